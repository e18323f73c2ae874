"""SequenceTable, the one gate that every state change passes; see request.pxd for the diagram."""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.math cimport isnan
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import numpy as np

from miro_cy.errors import InternalError

from miro_cy.native cimport MIRO_INDEX, MIRO_SPAN, SEQUENCE_TABLES, SEQUENCES, tally
from miro_cy.sched.sequence cimport (
    DECODING, FINISHED, NOTHING, PREFILLING, QUEUED, forget_tokens, logits_rows, start, to_compute)

_NAMES = ("nothing", "queued", "prefilling", "decoding", "finished")

# The legal edges: bit t of _EDGES[s] allows s -> t.
cdef int[5] _EDGES = [
    1 << QUEUED | 1 << DECODING,                      # from NOTHING
    1 << PREFILLING | 1 << FINISHED,                  # from QUEUED
    1 << DECODING | 1 << QUEUED | 1 << FINISHED,      # from PREFILLING
    1 << QUEUED | 1 << FINISHED,                      # from DECODING
    1 << NOTHING,                                     # from FINISHED
]


class StaleHandle(InternalError):
    """A handle was used after the transition that spent it: a bug in the scheduler."""


def legal_edges():
    """The edge table by name, as {(from, to)}, for tests and documentation."""
    return {(_NAMES[s], _NAMES[t]) for s in range(5) for t in range(5) if _EDGES[s] >> t & 1}


cdef class SequenceTable:
    """Every live sequence; n_entries of them at most, n_slots of which may own KV blocks at once.

    reserving: `admit` takes blocks for all tokens that a sequence may come to have, so that none ever has to grow.
    Handles are C structs; Python (tests) sees them as dicts {"slot", "generation"}.
    """

    def __cinit__(
        self, BlockPool pool not None, BlockTables tables not None, int n_entries, int n_slots, bint reserving=False
    ):
        if n_entries < 1 or not 1 <= n_slots <= tables.n_slots:
            raise ValueError(f"no sequence table with {n_entries} entries and {n_slots} of {tables.n_slots} slots")
        self.pool = pool
        self.tables = tables
        self.blocks = SequenceBlocks(pool, tables, n_slots, reserving)
        self.n_entries = self.n_entries_free = n_entries
        self._free_entry = np.arange(n_entries, dtype=np.int32)[::-1].copy()
        self._entry = <Sequence*> calloc(n_entries, sizeof(Sequence))
        if self._entry == NULL:
            raise MemoryError()
        tally(SEQUENCE_TABLES, 1)

    def __dealloc__(self):
        cdef int i
        if self._entry != NULL:
            for i in range(self.n_entries):
                forget_tokens(&self._entry[i])
            free(self._entry)
            tally(SEQUENCE_TABLES, -1)
            tally(SEQUENCES, self.n_entries_free - self.n_entries)

    # --- transitions ---------------------------------------------------------------------------------------------

    cpdef Queued create(
        self, int64_t sequence_id, const int32_t[::1] tokens, int max_new, int logits_from, double now, extras=()
    ) except *:
        """A new sequence with its own copy of the prompt. The arguments must have passed Limits.check.

        extras: pairs (tag, value) of bytes; it shares blocks with sequences of equal extras only.
        """
        cdef int n = <int> tokens.shape[0], slot
        cdef bytes domain = self.blocks.domain(extras)
        cdef Sequence* seq
        if n < 1 or max_new < 0 or n > 2147483647 - max_new:
            raise ValueError(f"no sequence of {n} + {max_new} tokens")
        slot = self._unused_entry()
        seq = &self._entry[slot]
        start(seq, sequence_id, &tokens[0], n, n + max_new, self.pool.block_size)
        memcpy(seq.chain.domain, PyBytes_AS_STRING(domain), len(domain))
        seq.logits_from = logits_from
        seq.arrival = now
        self.n_entries_free -= 1
        tally(SEQUENCES, 1)
        return Queued(slot, self._move(slot, seq.generation, NOTHING, QUEUED))

    cpdef Prefilling admit(self, Queued h, double now) except *:
        """Queued -> Prefilling: take a table slot and the blocks it needs, from the prefix index where it has them."""
        cdef Sequence* seq = self._at(h.slot, h.generation, QUEUED)
        self.blocks.admit(seq)
        if seq.order < 0:
            seq.admitted = now
            seq.order = self._n_admitted
            self._n_admitted += 1
        return Prefilling(h.slot, self._move(h.slot, h.generation, QUEUED, PREFILLING))

    cpdef Decoding start_decoding(self, Prefilling h, int token, double now) except *:
        """Prefilling -> Decoding: all its tokens are computed and their last logits gave `token`."""
        cdef Sequence* seq = self._at(h.slot, h.generation, PREFILLING)
        self._append(seq, token)
        if isnan(seq.first_token):
            seq.first_token = now
        return Decoding(h.slot, self._move(h.slot, h.generation, PREFILLING, DECODING))

    cpdef Queued preempt_prefilling(self, Prefilling h) except *:
        """Prefilling -> Queued: its blocks go back, its tokens will be computed again."""
        self.blocks.give_back(self._at(h.slot, h.generation, PREFILLING))
        return Queued(h.slot, self._move(h.slot, h.generation, PREFILLING, QUEUED))

    cpdef Queued preempt_decoding(self, Decoding h) except *:
        """Decoding -> Queued: its blocks go back, its tokens, generated ones too, will be computed again."""
        self.blocks.give_back(self._at(h.slot, h.generation, DECODING))
        return Queued(h.slot, self._move(h.slot, h.generation, DECODING, QUEUED))

    cpdef Finished finish_queued(self, Queued h) except *:
        """Queued -> Finished."""
        return Finished(h.slot, self._move(h.slot, h.generation, QUEUED, FINISHED))

    cpdef Finished finish_prefilling(self, Prefilling h) except *:
        """Prefilling -> Finished: its blocks go back."""
        self.blocks.give_back(self._at(h.slot, h.generation, PREFILLING))
        return Finished(h.slot, self._move(h.slot, h.generation, PREFILLING, FINISHED))

    cpdef Finished finish_decoding(self, Decoding h) except *:
        """Decoding -> Finished: its blocks go back."""
        self.blocks.give_back(self._at(h.slot, h.generation, DECODING))
        return Finished(h.slot, self._move(h.slot, h.generation, DECODING, FINISHED))

    cpdef int forget(self, Finished h) except -1:
        """Finished -> nothing: the entry can be used again."""
        self._move(h.slot, h.generation, FINISHED, NOTHING)
        forget_tokens(&self._entry[h.slot])
        tally(SEQUENCES, -1)
        self._free_entry[self.n_entries_free] = h.slot
        self.n_entries_free += 1
        return 0

    # --- queries -------------------------------------------------------------------------------------------------

    cdef bint holds_prefilling(self, Prefilling h) noexcept:
        MIRO_INDEX(h.slot, self.n_entries)
        return self._entry[h.slot].generation == h.generation and self._entry[h.slot].state == PREFILLING

    cdef bint holds_decoding(self, Decoding h) noexcept:
        MIRO_INDEX(h.slot, self.n_entries)
        return self._entry[h.slot].generation == h.generation and self._entry[h.slot].state == DECODING

    cdef const Sequence* queued(self, Queued h) except NULL:
        return self._at(h.slot, h.generation, QUEUED)

    cdef const Sequence* prefilling(self, Prefilling h) except NULL:
        return self._at(h.slot, h.generation, PREFILLING)

    cdef const Sequence* decoding(self, Decoding h) except NULL:
        return self._at(h.slot, h.generation, DECODING)

    cdef const Sequence* entry(self, int slot) except NULL:
        """A live entry, whatever its state, to be read only."""
        if slot < 0 or slot >= self.n_entries or self._entry[slot].state == NOTHING:
            raise InternalError(f"no sequence in entry {slot}")
        return &self._entry[slot]

    # --- blocks and tokens, see blocks.pxd -----------------------------------------------------------------------

    cpdef int blocks_to_admit(self, Queued h) except -1:
        """Blocks that `admit` takes of the available ones."""
        return self.blocks.to_admit(self._at(h.slot, h.generation, QUEUED))

    cpdef int blocks_to_promise(self, Queued h) except -1:
        """Blocks that must be there for it so that it never has to wait for one."""
        return self.blocks.to_promise(self._at(h.slot, h.generation, QUEUED))

    cpdef int blocks_to_grow(self, Decoding h) except -1:
        """Blocks that `grow` takes."""
        return self.blocks.to_grow(self._at(h.slot, h.generation, DECODING))

    cpdef int grow(self, Decoding h, BatchView view) except -1:
        """Make room for its last token; returns the blocks taken. InternalError when the pool has too few."""
        return self.blocks.grow(self._at(h.slot, h.generation, DECODING), view)

    cpdef int blocks_to_chunk(self, Prefilling h, int n_tok) except -1:
        """Blocks that `reach` takes."""
        return self.blocks.to_chunk(self._at(h.slot, h.generation, PREFILLING), n_tok)

    cpdef int reach(self, Prefilling h, int n_tok) except -1:
        """Make room for its next n_tok tokens; returns the blocks taken. InternalError when the pool has too few."""
        return self.blocks.reach(self._at(h.slot, h.generation, PREFILLING), n_tok)

    cpdef int trim(self, Prefilling h) except -1:
        """Give back what was taken for a chunk that came to nothing."""
        return self.blocks.trim(self._at(h.slot, h.generation, PREFILLING))

    cpdef int catch_up(self, Prefilling h) except -1:
        """Take what others have computed meanwhile of its next blocks; returns the tokens it need not compute."""
        return self.blocks.catch_up(self._at(h.slot, h.generation, PREFILLING))

    cpdef bint is_awaiting(self, Prefilling h) except -1:
        """Whether a row pushed for this step completes a block that it can take afterwards, instead of computing it."""
        return self.blocks.is_awaiting(self._at(h.slot, h.generation, PREFILLING))

    cpdef int push_chunk(self, Prefilling h, BatchView view, int n_tok) except -1:
        """Add a row with its next n_tok tokens to the view; returns the logits rows it asks for."""
        cdef Sequence* seq = self._at(h.slot, h.generation, PREFILLING)
        cdef int n_log = logits_rows(seq, n_tok)
        if n_tok < 1 or n_tok > to_compute(seq) or self.blocks.to_chunk(seq, n_tok) > 0:
            raise InternalError(f"sequence {seq.id} has no {n_tok} tokens to compute, or no room for them")
        MIRO_SPAN(seq.n_computed, n_tok, seq.capacity)
        view.push_row(seq.table_slot, seq.n_computed, seq.tokens + seq.n_computed, n_tok, n_log)
        self.blocks.expect(seq, n_tok)
        return n_log

    cpdef int push_next(self, Decoding h, BatchView view) except -1:
        """Add a row with the token generated last to the view; returns the logits rows it asks for."""
        cdef Sequence* seq = self._at(h.slot, h.generation, DECODING)
        if to_compute(seq) != 1 or self.blocks.to_grow(seq) > 0:
            raise InternalError(f"sequence {seq.id} has no token to decode, or no room for it")
        MIRO_INDEX(seq.n_computed, seq.capacity)
        view.push_row(seq.table_slot, seq.n_computed, seq.tokens + seq.n_computed, 1, 1)
        return 1

    cpdef int advance_prefilling(self, Prefilling h, int n_tok) except -1:
        """Its next n_tok tokens are in the KV cache now; returns how many are still to be computed."""
        return self._advance(self._at(h.slot, h.generation, PREFILLING), n_tok)

    cpdef int advance_decoding(self, Decoding h) except -1:
        """Its last token is in the KV cache now."""
        return self._advance(self._at(h.slot, h.generation, DECODING), 1)

    cpdef int append(self, Decoding h, int token) except -1:
        """Its last logits gave `token`."""
        return self._append(self._at(h.slot, h.generation, DECODING), token)

    # --- the gate ------------------------------------------------------------------------------------------------

    cdef Sequence* _at(self, int slot, uint32_t generation, State state) except NULL:
        """The entry behind a handle, if the handle is still good."""
        if slot < 0 or slot >= self.n_entries:
            raise StaleHandle(f"no sequence entry {slot}")
        cdef Sequence* seq = &self._entry[slot]
        if seq.generation != generation or seq.state != state:
            raise StaleHandle(
                f"a {_NAMES[state]} handle of entry {slot} is spent: the entry is {_NAMES[seq.state]}, "
                f"generation {seq.generation}, the handle's is {generation}"
            )
        return seq

    cdef uint32_t _move(self, int slot, uint32_t generation, State source, State target) except? 0:
        """Change a state: the only place that does. Returns the generation of the new handle."""
        cdef Sequence* seq = self._at(slot, generation, source)
        if not _EDGES[<int> source] >> target & 1:
            raise InternalError(f"a {_NAMES[source]} sequence cannot become {_NAMES[target]}")
        seq.state = target
        seq.generation += 1
        return seq.generation

    cdef int _unused_entry(self) except -1:
        """An unused entry; it is taken once n_entries_free is lowered."""
        if self.n_entries_free == 0:
            raise InternalError(f"all {self.n_entries} sequence entries are taken")
        return self._free_entry[self.n_entries_free - 1]

    cdef int _advance(self, Sequence* seq, int n_tok) except -1:
        if n_tok < 1 or n_tok > to_compute(seq):
            raise InternalError(f"sequence {seq.id} cannot advance by {n_tok} tokens")
        seq.n_computed += n_tok
        if seq.logits_from >= 0:
            # Delivered logits are not asked for again when a preemption has the prompt recomputed.
            seq.logits_from = max(seq.logits_from, seq.n_computed)
        self.blocks.publish(seq)
        return seq.n_tokens - seq.n_computed

    cdef int _append(self, Sequence* seq, int token) except -1:
        if seq.n_computed != seq.n_tokens or seq.n_tokens == seq.capacity or token < 0:
            raise InternalError(f"sequence {seq.id} cannot take token {token} now")
        MIRO_INDEX(seq.n_tokens, seq.capacity)
        seq.tokens[seq.n_tokens] = token
        seq.n_tokens += 1
        return 0

    def check(self):
        """Raise AssertionError unless entries, states, slots and blocks agree (promise 3)."""
        cdef Sequence* seq
        cdef int i, live = 0
        slots = set()
        for i in range(self.n_entries):
            seq = &self._entry[i]
            if seq.state == NOTHING:
                continue
            live += 1
            owner = seq.state == PREFILLING or seq.state == DECODING
            if owner != (seq.table_slot >= 0) or seq.table_slot in slots:
                raise AssertionError(f"sequence {seq.id} is {_NAMES[seq.state]} with table slot {seq.table_slot}")
            if not 0 <= seq.n_computed <= seq.n_tokens <= seq.capacity or (not owner and seq.n_computed):
                raise AssertionError(f"sequence {seq.id}: {seq.n_computed}, {seq.n_tokens}, {seq.capacity} tokens")
            if owner:
                slots.add(seq.table_slot)
                self.blocks.check_one(seq)
        if live + self.n_entries_free != self.n_entries:
            raise AssertionError(f"{live} live and {self.n_entries_free} free entries are not {self.n_entries}")
        self.blocks.check(slots)
