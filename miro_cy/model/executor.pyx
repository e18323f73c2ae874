"""The CPU executor: one forward pass over a ragged batch, all threads walking through the layers together.

`forward(BatchView) -> logits rows` is the seam where another executor plugs in. One parallel region spans a step; ops
are kernels called by every thread, with a barrier where one op reads what another wrote. Nothing is allocated in a
step, apart from a larger logits buffer when more rows are scored than ever before.
"""

from cython.parallel cimport parallel, prange
from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memcpy

import numpy as np

from miro_cy._kernels import memory
from miro_cy._kernels.abi cimport (
    QBLOCK, TILE_ROWS, BatchRows, KernelTable, PackedMatrix, activation_bytes, is_float_layout,
)
from miro_cy._kernels.kv cimport KVLayer, copy_block, touch_layer
from miro_cy._kernels.rows cimport bind_rows
from miro_cy._kernels.select cimport table_of
from miro_cy._kernels.team cimport Team, mi_join, mi_leave, mi_meet, mi_member
from miro_cy.batch cimport BatchView
from miro_cy.model.step cimport (
    ATTENTION, ATTENTION_OUT, DOWN, EMBED, GATE_UP, MAX_LAYERS, N_PARTS, NORM, OUTPUT, QKV, ROPE, SWIGLU, Buffers,
    Layer, call_for, matrix_of, mi_profile, mi_profile_begin, mi_profile_mark, scratch_of, set_weights, set_widths,
)
from miro_cy.native cimport EXECUTORS, KV_BYTES, MIRO_INDEX, tally

from miro_cy._kernels.select import TILES, active_isa
from miro_cy.model.kv_groups import kv_groups
from miro_cy.model.rope import RopeTables
from miro_cy.model.step import buffer_bytes

#: The parts of a step that `profile` tells apart, in the order of step.pxd.
PARTS = ("embed", "norm", "qkv", "rope", "attention", "attention_out", "gate_up", "swiglu", "down", "output")


cdef class CpuExecutor:
    """Runs a model on the CPU.

    spec: ModelSpec; weights: Weights; n_blocks, block_size: the KV pool (kv_groups.py: of which layers a
    block is); kv_dtype: a key of KV_TYPES;
    fast: multiply quantised weights by int8 activations (else float32 throughout); tiles: in tile registers, quantised
    ones by bfloat16 activations, those of 16 bits as exactly as without; threads: team size;
    max_tokens: most tokens a step; context: positions the rotary tables cover; touch: take the KV pool's memory now.
    """
    cdef readonly object spec
    cdef readonly object weights
    cdef readonly int threads
    cdef readonly bint fast
    cdef readonly str compute               # "exact", "fast" or "bf16"
    cdef readonly str isa                   # the build of the kernels
    cdef readonly object groups             # KVGroups: a block table each
    cdef readonly list kv_layers            # KVLayer of each place in a group
    cdef int32_t[::1] full_group            # [places] the layers of the first group, which is full: one in each place
    cdef readonly Py_ssize_t kv_bytes       # bytes of the KV pool
    cdef readonly Py_ssize_t buffer_bytes   # bytes of the buffers, rotary tables aside; grows with the logits rows
    cdef const KernelTable* table
    cdef Team team
    cdef object rope
    cdef object buffers                     # the Arena of a step's activations
    cdef list keep                          # arrays that raw pointers below point into
    cdef Layer layers[MAX_LAYERS]
    cdef Buffers b
    cdef int n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, rope_dim, max_tokens, context
    cdef float eps
    cdef const PackedMatrix* embedding
    cdef const PackedMatrix* output
    cdef const float* output_norm
    cdef const float* cos
    cdef const float* sin
    cdef float* scratch
    cdef Py_ssize_t scratch_floats
    cdef object logits_array
    cdef BatchView view
    cdef BatchRows rows                     # the view's
    cdef bint counted                       # among the live objects
    cdef mi_profile profile

    def __cinit__(self, *_, **__):
        tally(EXECUTORS, 1)
        self.counted = True

    def __dealloc__(self):
        self.uncount()

    def __init__(
        self, spec, weights, *, int n_blocks, int block_size, str kv_dtype, bint fast, int threads, int max_tokens,
        int context, bint touch=False, bint tiles=False,
    ):
        if spec.n_layers > MAX_LAYERS:
            raise ValueError(f"{spec.n_layers} layers are more than {MAX_LAYERS}")
        self.isa = TILES if tiles else active_isa()
        self.table = table_of(self.isa)
        self.compute = "exact" if not fast else "bf16" if tiles else "fast"
        self.spec, self.weights, self.keep, self.kv_layers = spec, weights, [], []
        self.groups, self.team = kv_groups(spec), Team(threads)
        self.fast, self.threads, self.max_tokens, self.context = fast, threads, max_tokens, context
        self.n_layers, self.hidden, self.n_heads = spec.n_layers, spec.hidden_size, spec.n_heads
        self.n_kv_heads, self.head_dim, self.ffn = spec.n_kv_heads, spec.head_dim, spec.ffn_size
        self.rope_dim, self.eps = spec.rope.dim, spec.norm_eps
        self.embedding, self.output = matrix_of(weights.embedding), matrix_of(weights.output)
        self.output_norm = self.floats(weights.output_norm)
        self.rope = RopeTables(spec.rope, context)
        self.cos, self.sin = self.floats(self.rope.cos.reshape(-1)), self.floats(self.rope.sin.reshape(-1))
        for i in range(self.n_layers):
            self.bind_layer(i, weights.layers[i], spec.layers[i])
        self.allocate_kv(n_blocks, block_size, kv_dtype, touch)
        self.allocate_buffers()
        self.grow_logits(1)

    cdef float* floats(self, array) except NULL:
        """The data of a float32 array, which is kept alive."""
        cdef float[::1] view = array
        self.keep.append(array)
        return &view[0]

    cdef float* zeros(self, Py_ssize_t n) except NULL:
        array = self.buffers.zeros(max(n, 1), np.float32)
        self.buffer_bytes += array.nbytes
        return self.floats(array)

    cdef void* rounded(self, Py_ssize_t m, Py_ssize_t k) except NULL:
        """Room for m rows of k rounded activations."""
        cdef uint8_t[::1] room = self.buffers.zeros(max(activation_bytes(m, k), 1), np.uint8)
        self.keep.append(room)
        self.buffer_bytes += room.nbytes
        return &room[0]

    cdef bind_layer(self, int i, weights, spec):
        cdef Layer* layer = &self.layers[i]
        self.keep.append(set_weights(layer, weights.matrices, weights.vectors))
        layer.attention.n_heads = self.n_heads
        layer.attention.scale = self.spec.attention_scale
        layer.attention.soft_cap = spec.soft_cap
        layer.attention.window = spec.window

    cdef allocate_kv(self, Py_ssize_t n_blocks, int block_size, str kv_dtype, bint touch):
        """The KV pool. touch: take its memory now, with all threads; most of the time goes into page faults."""
        cdef KVLayer kv
        cdef int i, n_places = self.groups.size
        if kv_dtype == "bf16" and not self.table.tiles:
            raise ValueError("a KV cache of bf16 is for kernels with tile registers")
        sizes = (n_blocks, self.n_kv_heads, self.head_dim, block_size, kv_dtype)
        # what is taken at once may be in large pages; what is taken bit by bit would be all there with the first of it
        arena = memory.Arena(n_places * KVLayer.room(*sizes)) if touch else None
        for _ in range(n_places):
            kv = KVLayer(*sizes, arena)
            self.kv_layers.append(kv)
            self.kv_bytes += kv.nbytes
            tally(KV_BYTES, kv.nbytes)
        for i, (group, place) in enumerate(self.groups.places()):
            kv = self.kv_layers[place]
            self.layers[i].kv, self.layers[i].group = kv.cache, group
        self.full_group = np.array(self.groups.layers[0], np.int32)
        if touch:
            for i in prange(n_places, nogil=True, num_threads=self.threads, schedule="dynamic"):
                touch_layer(&self.layers[self.full_group[i]].kv)

    cdef allocate_buffers(self):
        cdef Buffers* b = &self.b
        cdef Py_ssize_t t = self.max_tokens
        size = buffer_bytes(self.spec, threads=self.threads, max_tokens=self.max_tokens, max_logits=0)
        self.buffers = memory.Arena(size + 16 * memory.LINE)
        set_widths(b, self.spec)
        b.x, b.h, b.delta = self.zeros(t * b.ld_x), self.zeros(t * b.ld_h), self.zeros(t * b.ld_d)
        b.q, b.k, b.v = self.zeros(t * b.ld_q), self.zeros(t * b.ld_kv), self.zeros(t * b.ld_kv)
        b.gate, b.up = self.zeros(t * b.ld_f), self.zeros(t * b.ld_f)
        b.a.data, b.f.data = self.rounded(t, b.ld_h), self.rounded(t, self.ffn)
        self.scratch_floats = scratch_of(self.head_dim)
        self.scratch = self.zeros(self.threads * self.scratch_floats)

    cdef grow_logits(self, Py_ssize_t rows):
        cdef float[:, ::1] view
        if self.logits_array is None or self.logits_array.shape[0] < rows:
            self.buffer_bytes -= 0 if self.logits_array is None else self.logits_array.nbytes
            self.logits_array = memory.zeros((rows, self.b.ld_v), np.float32)
            self.buffer_bytes += self.logits_array.nbytes
            view = self.logits_array
            self.b.logits = &view[0, 0]

    def forward(self, BatchView view not None):
        """One step: copies blocks, writes the batch's K and V, returns logits float32 [view.n_logits, vocab].

        The array is a view that the next call overwrites. Raises ValueError for a view that does not fit.
        """
        cdef int i, positions = 0
        if self.weights is None:
            raise ValueError("the executor is closed")
        if view.tables.shape[0] != len(self.groups.windows):
            raise ValueError(f"{len(self.groups.windows)} block tables a sequence are needed")
        if view.n_rows < 1 or view.n_tokens > self.max_tokens:
            raise ValueError(f"a step takes 1 to {self.max_tokens} tokens, not {view.n_tokens}")
        for i in range(view.n_tokens):
            if not 0 <= view.tokens[i] < self.embedding.n:
                raise ValueError(f"token id {view.tokens[i]} is not in the vocabulary")
        for i in range(view.n_rows):
            positions = max(positions, view.first_pos[i] + view.n_tok[i])
        if positions > self.context:
            raise ValueError(f"position {positions - 1} is past the context of {self.context}")
        self.rope.fill_to(positions)
        self.grow_logits(view.n_logits)
        self.view = view
        bind_rows(view, &self.rows)
        with nogil, parallel(num_threads=self.threads):
            self.walk()
        view.copies_made()
        return self.logits_array[:view.n_logits, :self.output.n]

    def start_profile(self):
        """From now on, book the time of every step to its parts."""
        cdef int part
        self.profile.on = 1
        for part in range(N_PARTS):
            self.profile.seconds[part] = 0

    def stop_profile(self):
        """Seconds that each of PARTS took since `start_profile`, waiting for the slowest thread included."""
        self.profile.on = 0
        return {name: self.profile.seconds[part] for part, name in enumerate(PARTS)}

    def close(self):
        """Give back weights, KV pool and buffers; `forward` raises from then on."""
        self.weights = self.logits_array = self.view = self.buffers = None
        self.keep, self.kv_layers = [], []
        self.uncount()

    cdef void uncount(self) noexcept:
        if self.counted:
            tally(EXECUTORS, -1)
            tally(KV_BYTES, -self.kv_bytes)
            self.counted = False

    cdef void walk(self) noexcept nogil:
        """The forward pass, as one of the team."""
        cdef mi_member me = mi_join(&self.team.shared)
        cdef int th = me.th, nth = me.nth
        cdef BatchRows rows = self.rows
        cdef Buffers* b = &self.b
        cdef int i
        cdef const float* delta = NULL
        cdef const float* bias = NULL
        cdef mi_profile* p = &self.profile
        mi_profile_begin(p, th)
        self.copy_blocks(th, nth)
        self.table.embed(
            th, nth, self.embedding, &self.view.tokens[0], rows.n_tokens, b.x, self.hidden,
            self.scratch + th * self.scratch_floats,
        )
        self.meet(&me, EMBED)
        for i in range(self.n_layers):
            rows.table = &self.view.tables[self.layers[i].group, 0, 0]
            self.attention_block(&me, &self.layers[i], &rows, delta, bias)
            delta = b.delta
            bias = self.layers[i].o_bias
            self.ffn_block(
                &me, &self.layers[i], rows.n_tokens, delta, bias,
                self.layers[i + 1].q if i + 1 < self.n_layers else self.output,
            )
            bias = self.layers[i].down_bias
        if self.view.n_logits > 0:
            self.output_block(&me, &rows, bias)
            mi_profile_mark(p, th, OUTPUT)
        mi_leave(&me)

    cdef void copy_blocks(self, int th, int nth) noexcept nogil:
        """What the view wants copied, each thread in its own places of a group; written behind a barrier."""
        cdef int i, at, n = <int>self.full_group.shape[0]
        for at in range(self.view.n_copies):
            for i in range(n * th // nth, n * (th + 1) // nth):
                copy_block(&self.layers[self.full_group[i]].kv, self.view.copy[at, 1], self.view.copy[at, 2])

    cdef void meet(self, mi_member* me, int part) noexcept nogil:
        """Wait until every thread has done its share of a part of the step."""
        mi_meet(me)
        mi_profile_mark(&self.profile, me.th, part)

    cdef bint in_integers(self, const PackedMatrix* w) noexcept nogil:
        return self.fast and not is_float_layout(w.layout)

    cdef void multiply(
        self, mi_member* me, const PackedMatrix* w, const float* x, Py_ssize_t ldx, float* y, Py_ssize_t ldy,
        Py_ssize_t m,
    ) noexcept nogil:
        """y = x W^T; x also lies quantised in b.a where W is multiplied in integers."""
        cdef float* scratch = self.scratch + me.th * self.scratch_floats
        if self.in_integers(w):
            self.table.matmul_i8(me, w, &self.b.a, y, ldy, m, scratch)
        else:
            self.table.matmul_f32(me, w, x, ldx, y, ldy, m, scratch)

    cdef void quantise_normed(self, mi_member* me, Py_ssize_t m) noexcept nogil:
        """What add_rmsnorm has just put into h, into b.a: each thread its own rows, or a few rows by all of them."""
        cdef bint own = m == 1 or m >= 2 * TILE_ROWS
        if not own:
            mi_meet(me)
        self.table.quantise(me.th, me.nth, self.b.h, self.hidden, m, self.hidden, &self.b.a, own)

    cdef void attention_block(
        self, mi_member* me, const Layer* w, const BatchRows* rows, const float* delta, const float* bias,
    ) noexcept nogil:
        """x += the previous block's delta; delta = W_o attention(norm(x))."""
        cdef Buffers* b = &self.b
        cdef Py_ssize_t m = rows.n_tokens
        cdef int th = me.th, nth = me.nth, d = self.head_dim
        # whether a KV group's output fills whole blocks, so that who computes it can quantise it
        cdef bint own_blocks = self.in_integers(w.o) and self.n_heads // self.n_kv_heads * d % QBLOCK == 0
        self.table.add_rmsnorm(th, nth, b.x, delta, b.ld_d, bias, w.attn_norm, b.h, m, self.hidden, self.eps)
        if self.in_integers(w.q) or self.in_integers(w.k) or self.in_integers(w.v):
            self.quantise_normed(me, m)
        self.meet(me, NORM)
        self.multiply(me, w.q, b.h, self.hidden, b.q, b.ld_q, m)
        self.multiply(me, w.k, b.h, self.hidden, b.k, b.ld_kv, m)
        self.multiply(me, w.v, b.h, self.hidden, b.v, b.ld_kv, m)
        call_for(self.table, w.o, th, nth, m)
        self.meet(me, QKV)
        self.table.rope(
            th, nth, rows, b.q, b.ld_q, self.n_heads, d, self.rope_dim, self.cos, self.sin, w.q_bias, w.q_norm,
            self.eps,
        )
        self.table.rope(
            th, nth, rows, b.k, b.ld_kv, self.n_kv_heads, d, self.rope_dim, self.cos, self.sin, w.k_bias, w.k_norm,
            self.eps,
        )
        self.table.kv_write(th, nth, rows, &w.kv, b.k, b.ld_kv, b.v, b.ld_kv, w.v_bias)
        self.meet(me, ROPE)
        self.table.attention(
            me, rows, &w.kv, &w.attention, b.q, b.ld_q, b.h, self.n_heads * d,
            &b.a if own_blocks else NULL, self.scratch + th * self.scratch_floats,
        )
        self.meet(me, ATTENTION)
        if self.in_integers(w.o) and not own_blocks:
            self.table.quantise(th, nth, b.h, self.n_heads * d, m, self.n_heads * d, &b.a, False)
            self.meet(me, ATTENTION)
        self.multiply(me, w.o, b.h, self.n_heads * d, b.delta, b.ld_d, m)
        call_for(self.table, w.gate, th, nth, m)
        call_for(self.table, w.up, th, nth, m)
        self.meet(me, ATTENTION_OUT)

    cdef void ffn_block(
        self, mi_member* me, const Layer* w, Py_ssize_t m, const float* delta, const float* bias,
        const PackedMatrix* after,
    ) noexcept nogil:
        """x += the attention's delta; delta = W_down swiglu(W_gate h, W_up h), h = norm(x). after: what comes next."""
        cdef Buffers* b = &self.b
        cdef int th = me.th, nth = me.nth
        self.table.add_rmsnorm(th, nth, b.x, delta, b.ld_d, bias, w.ffn_norm, b.h, m, self.hidden, self.eps)
        if self.in_integers(w.gate) or self.in_integers(w.up):
            self.quantise_normed(me, m)
        self.meet(me, NORM)
        if self.in_integers(w.gate) and self.in_integers(w.up) and self.in_integers(w.down):
            self.table.swiglu_i8(
                me, w.gate, w.up, &b.a, w.gate_bias, w.up_bias, &b.f, m, self.scratch + th * self.scratch_floats,
            )
            call_for(self.table, w.down, th, nth, m)
            self.meet(me, GATE_UP)
            self.table.matmul_i8(
                me, w.down, &b.f, b.delta, b.ld_d, m, self.scratch + th * self.scratch_floats,
            )
            call_for(self.table, after, th, nth, m)
            self.meet(me, DOWN)
            return
        self.multiply(me, w.gate, b.h, self.hidden, b.gate, b.ld_f, m)
        self.multiply(me, w.up, b.h, self.hidden, b.up, b.ld_f, m)
        self.meet(me, GATE_UP)
        self.table.swiglu(th, nth, b.gate, b.up, b.ld_f, w.gate_bias, w.up_bias, b.h, self.ffn, m, self.ffn)
        if self.in_integers(w.down):
            self.table.quantise(th, nth, b.h, self.ffn, m, self.ffn, &b.a, False)
        call_for(self.table, w.down, th, nth, m)
        self.meet(me, SWIGLU)
        self.multiply(me, w.down, b.h, self.ffn, b.delta, b.ld_d, m)
        call_for(self.table, after, th, nth, m)
        self.meet(me, DOWN)

    cdef void output_block(self, mi_member* me, const BatchRows* rows, const float* bias) noexcept nogil:
        """Logits of the tokens that need them: their rows are gathered to the front, then normalised and projected."""
        cdef Buffers* b = &self.b
        cdef Py_ssize_t m = self.view.n_logits
        cdef Py_ssize_t i = 0, j, t
        cdef int r
        if me.th == 0:                  # rows move towards the front, in ascending order: none is overwritten unread
            for r in range(rows.n_rows):
                for j in range(rows.n_tok[r] - self.view.n_log[r], rows.n_tok[r]):
                    t = rows.offset[r] + j
                    MIRO_INDEX(t, rows.n_tokens)
                    MIRO_INDEX(i, t + 1)
                    if t != i:
                        memcpy(b.x + i * self.hidden, b.x + t * self.hidden, self.hidden * sizeof(float))
                        memcpy(b.delta + i * b.ld_d, b.delta + t * b.ld_d, self.hidden * sizeof(float))
                    i += 1
        mi_meet(me)
        self.table.add_rmsnorm(
            me.th, me.nth, b.x, b.delta, b.ld_d, bias, self.output_norm, b.h, m, self.hidden, self.eps,
        )
        if self.in_integers(self.output):
            self.quantise_normed(me, m)
        mi_meet(me)
        self.multiply(me, self.output, b.h, self.hidden, b.logits, b.ld_v, m)
