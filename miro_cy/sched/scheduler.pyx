"""The continuous batcher: plan() says what the next step computes, commit() takes in what it gave.

A step, in order:

    0. The oldest prompt, if it is older than all that decode, takes the blocks for its next token. It can lack them
       only in a layer group with a window, whose blocks are taken as it goes.
    1. Every decoding sequence gets its next token, oldest first. When the pool has no block for it, the newest
       running sequence gives its blocks back and goes to the front of the queue (it may be the one that asked).
    2. What is left of the step's time goes to prompt chunks, older sequences first. First a prompt takes what others
       have computed of it; one whose next block an older row of this very step computes waits for that, and one that
       finds no block for its next token waits for a later step.
    3. While budget is left, sequences are admitted, first the preempted ones, oldest first, then whom the policy names;
       none overtakes another. One is admitted when the pool has all the blocks for its tokens and the next one (a
       preempted sequence's tokens are its prompt and all it has generated), and beside them, unless nothing runs, the
       watermark and a block in each layer group for every running sequence that may still grow, and every fork still to
       come: what is admitted should not be preempted at once. Under `admission="reserve"` all that it may come to need
       is kept for it, and so is what its forks may (room.pxd). A request whose forks are more than there is room for is
       admitted when nothing else is; forks without room wait like preempted sequences, and so do those that join a
       family, to whom newer ones that run give way.

Why this ends: sequences are older or newer by their first admission. The oldest is never preempted for another, and
whatever `check` let in fits an empty pool, so the oldest always advances, and with it each in turn. Who waits for its
first admission is reached because policies let no stream of newcomers pass it for ever.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

import numpy as np

from miro_client.checks import check_int, shown
from miro_cy.errors import BadField, ConfigError, InternalError, QueueFull
from miro_cy.sched.budget import StepBudget
from miro_cy.sched.config import SchedulerConfig
from miro_cy.sched.families import Families
from miro_cy.sched.limits import Limits
from miro_cy.sched.policy import make_policy
from miro_cy.sched.rate import QueueRate

from miro_cy.batch cimport BatchView
from miro_cy.cache.block_pool cimport BlockPool
from miro_cy.cache.block_table cimport BlockTables
from miro_cy.native cimport MIRO_INDEX
from miro_cy.sched.relatives cimport RelatedSequences
from miro_cy.sched.request cimport Decoding, Prefilling, Queued, SequenceTable
from miro_cy.sched.room cimport KVRoom
from miro_cy.sched.sequence cimport Sequence, is_older, to_compute
from miro_cy.sched.sets cimport SequenceSets

__all__ = ["Scheduler", "SchedulerConfig"]


cdef class Scheduler(RelatedSequences):
    """Decides, a step at a time, which tokens of which sequences are computed.

    pool, tables: the KV bookkeeping; nobody else takes blocks from it. max_context: most tokens of a sequence.
    clock: monotonic seconds. One thread calls it, except `check`, which any thread may.

    Raises ConfigError when the parts do not fit each other.
    """

    cdef readonly object limits
    cdef readonly object config
    cdef readonly int max_logits        # most logits rows of a step
    cdef BlockPool _pool
    cdef object _budget
    cdef object _rate                   # of the waiting queue
    # The last plan: its rows are _n_decode Decoding handles, then Prefilling ones.
    cdef int _n_decode
    cdef int64_t _decode_keys           # keys that those rows attend to
    cdef Decoding* _decode_row          # [max_num_seqs]
    cdef Prefilling* _chunk_row         # [max_num_seqs]
    cdef int64_t[::1] _row_id           # [max_num_seqs]

    def __cinit__(
        self, BlockPool pool not None, BlockTables tables not None, config not None, *, max_context, clock
    ):
        cdef int n_rows = config.max_num_seqs
        cdef int64_t table_tokens = min(<int64_t> tables.max_blocks * pool.block_size, <int64_t> 2147483647)
        if tables.n_slots < n_rows:
            raise ConfigError(
                f"max_num_seqs is {n_rows}, the block tables have {tables.n_slots} slots", field="max_num_seqs")
        if not 1 <= max_context <= table_tokens:
            raise ConfigError(
                f"max_context must be between 1 and the {table_tokens} tokens of a block table, "
                f"not {shown(max_context)}",
                field="max_context")
        self.config = config
        self._clock = clock
        self._budget = StepBudget(config)
        self._policy = make_policy(config)
        self._rate = QueueRate(config.step_ms)
        self._pool = pool
        # What was admitted once, running or not, is beside max_waiting others: as much as may run, or one request.
        self._table = SequenceTable(
            pool, tables, config.max_waiting + max(n_rows, config.max_choices), n_rows, config.admission == "reserve")
        self._families = Families()
        self._sets = SequenceSets(self._table)
        self._room = KVRoom(self._sets, int(config.watermark * pool.n_blocks))
        self.limits = Limits(max_context, self._table.blocks.windows.capacity())
        # Beside a prompt chunk there are at most max_num_seqs - 1 decode rows.
        self.view = BatchView(n_rows, max(config.max_step_tokens, n_rows - 1 + self._budget.min_tokens), tables.table)
        self.max_logits = n_rows + config.max_score_tokens
        self._row_id = np.zeros(n_rows, np.int64)
        self._decode_row = <Decoding*> malloc(n_rows * sizeof(Decoding))
        self._chunk_row = <Prefilling*> malloc(n_rows * sizeof(Prefilling))
        if self._decode_row == NULL or self._chunk_row == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self._decode_row)
        free(self._chunk_row)

    # --- arrival -------------------------------------------------------------------------------------------------

    def check(self, n_prompt, max_new):
        """Refuse what `add` would refuse whatever else is running; any thread. Raises as Limits.check."""
        self.limits.check(n_prompt, max_new)

    def has_room(self, choices=1):
        """Whether the queue takes a sequence that may become so many."""
        waiting = self._families.n_waiting
        return waiting == 0 or waiting + choices <= self.config.max_waiting

    def add(
        self, const int32_t[::1] tokens not None, max_new, *, choices=1, logits_from=-1, extras=(), priority=0,
        client="",
    ):
        """Queue a sequence; returns its id, larger than any before.

        tokens: the prompt, int32 [n], copied. max_new: most tokens to generate. choices: most sequences that it and its
        forks will be at once. logits_from: first prompt position whose logits are wanted (scoring); -1: only the last.
        extras: pairs (tag, value) of bytes that keep its cached blocks apart from those of sequences with others.
        priority, client: what the policies of these names look at.
        Raises BadField, ContextOverflow, Unschedulable, or QueueFull with an estimate of when to try again.
        """
        cdef Py_ssize_t n = tokens.shape[0], i
        self.limits.check(n, max_new)
        check_int("choices", choices, 1, self.config.max_choices, error=BadField)
        if not -1 <= logits_from < n:
            raise BadField(f"logits_from must be between -1 and {n - 1}, not {shown(logits_from)}", field="logits_from")
        for i in range(n):
            if tokens[i] < 0:
                raise BadField(f"token {i} of the prompt is {tokens[i]}, ids start at 0", field="prompt")
        cdef double now = self._clock()
        if not self.has_room(choices):
            oldest = self._table.queued(self._sets.waiting[0]).arrival
            raise QueueFull(
                f"{self._families.n_waiting} sequences wait already (limit {self.config.max_waiting})",
                retry_after_ms=self._rate.retry_ms(now, oldest, self._sets.n_waiting),
            )
        cdef int64_t seq = self._sets.add(tokens, max_new, logits_from, now, extras)
        self._families.add(seq, choices, self._room.fork_blocks(n, max_new))
        self._policy.add(seq, now, priority, client)
        return seq

    # --- a step --------------------------------------------------------------------------------------------------

    def plan(self):
        """The next step's batch, or None when there is nothing to compute.

        The view is the scheduler's own and is filled anew by the next call. A plan that is never committed (the step
        failed) changes nothing: the next one computes the same tokens again.
        """
        self.view.clear()
        self._table.blocks.begin_plan()
        if self._is_planned:
            self._drop_plan()
        self._keep_oldest_going()
        self._plan_decodes()
        self._plan_chunks()
        if self.view.n_rows == 0:
            if self.n_waiting > 0 and self._sets.n_running() == 0:
                raise InternalError("the KV pool is empty of sequences and yet cannot take the first in the queue")
            return None
        self._is_planned = True
        return self.view

    cdef int _drop_plan(self) except -1:
        """The last plan came to nothing: blocks that were taken for its chunks alone go back."""
        cdef int i
        self._is_planned = False
        for i in range(self._sets.n_prefilling):
            self._table.trim(self._sets.prefilling[i])
        return 0

    cdef int _keep_oldest_going(self) except -1:
        """A prompt that is older than all that decode takes the blocks for its next token before anybody else does."""
        cdef const Sequence* seq = NULL
        cdef const Sequence* other
        cdef Prefilling h
        cdef int i
        if self._table.blocks.windows.n_rolling == 0:      # it took all its blocks when it was admitted
            return 0
        for i in range(self._sets.n_prefilling):
            h = self._sets.prefilling[i]
            seq = self._table.prefilling(h)
            if to_compute(seq) > 0:
                break
        else:
            return 0
        for i in range(self._sets.n_decoding):
            other = self._table.decoding(self._sets.decoding[i])
            if is_older(other, seq) and to_compute(other) > 0:
                return 0
        self._table.catch_up(h)
        while self._table.blocks_to_chunk(h, 1) > self._pool.available():
            if self._sets.n_running() > 1 and not self._sets.is_newest(seq):
                self._preempt_newest()
            elif self._sets.n_running() > 1:    # older ones hold the blocks, and wait for something else
                return 0
            else:
                raise InternalError("the whole KV pool cannot hold the only running sequence")
        return self._table.reach(h, 1)

    cdef int _preempt_newest(self) except -1:
        """The newest running sequence gives way. InternalError when it is the only one."""
        if self._sets.n_running() < 2:
            raise InternalError("the whole KV pool cannot hold the only running sequence")
        return self._sets.preempt_newest()

    cdef int _plan_decodes(self) except -1:
        """A row for each decoding sequence, preempting the newest when there is no room for it."""
        cdef int i = 0
        cdef Decoding h
        self._n_decode = 0
        self._decode_keys = 0
        while i < self._sets.n_decoding:
            h = self._sets.decoding[i]
            if to_compute(self._table.decoding(h)) == 0:  # waits to be finished
                i += 1
            elif self._table.blocks_to_grow(h) <= self._pool.available():
                self._table.grow(h, self.view)
                self._row_id[self.view.n_rows] = self._table.decoding(h).id
                self._table.push_next(h, self.view)
                self._decode_keys += self._table.decoding(h).n_computed + 1
                MIRO_INDEX(self._n_decode, self.view.max_rows)
                self._decode_row[self._n_decode] = h
                self._n_decode += 1
                i += 1
            else:
                # The victim is not older than h, so it has no row yet; if it is h itself, this loop ends.
                self._preempt_newest()
        return 0

    cdef int _plan_chunks(self) except -1:
        """Prompt chunks for the rest of the budget, admitting what fits."""
        cdef int scores = self.config.max_score_tokens
        cdef int i = 0, n, first
        cdef double now = self._clock()
        self._budget.begin(self._n_decode, self._decode_keys)
        while not self._budget.spent:
            if i == self._sets.n_prefilling:
                if not self._admit_next(now):
                    break
            self._table.catch_up(self._sets.prefilling[i])
            n = self._chunk_tokens(self._sets.prefilling[i], scores)
            if n > 0:
                n = self._room.fitting(self._sets.prefilling[i], n)
            if n > 0:
                first = self._table.prefilling(self._sets.prefilling[i]).n_computed
                n = self._budget.fit(first, n)
                if n == 0:
                    break
                self._budget.take(first, n)
                scores -= self._push_chunk(self._sets.prefilling[i], n)
            i += 1
        return 0

    cdef bint _admit_next(self, double now) except -1:
        """Admit the sequence whose turn it is, if there is one and the pool has room for it."""
        cdef const Sequence* seq
        if self._sets.n_running() == self.config.max_num_seqs:
            return False
        if self._sets.n_preempted > 0:
            if not self._has_room(self._sets.preempted[0]):
                return False
            self._sets.admit_preempted(now)
            return True
        id = self._policy.next()
        if id is None or not self._has_place(id) or not self._has_room(self._sets.find_waiting(id)):
            return False
        self._sets.admit_waiting(id, now)
        self._families.admit(id)
        self._policy.remove(id)
        self._rate.left(now)
        seq = self._sets.find(id)
        self._policy.charge(id, to_compute(seq), 0)
        return True

    cdef bint _has_place(self, id) except -1:
        """Whether a waiting sequence and its forks may run beside all that were admitted."""
        cdef int n = self._families.n_admitted
        return n == 0 or n + self._families.size(id) <= self.config.max_num_seqs

    cdef bint _has_room(self, Queued h) except -1:
        """Whether the pool has the blocks that it needs now, and what should stay free beside them."""
        cdef const Sequence* seq = self._table.queued(h)
        cdef int forks = self._families.promised_blocks
        if seq.order < 0:
            forks += self._families.promised_to(seq.family)
        return self._room.admits(h, forks)

    cdef int _chunk_tokens(self, Prefilling h, int scores) except -1:
        """How many tokens of a prompt could be computed now, given what is left of scored logits rows."""
        cdef const Sequence* seq = self._table.prefilling(h)
        cdef int n = to_compute(seq)
        if self._table.is_awaiting(h):
            return 0
        if seq.logits_from >= 0:
            n = min(n, max(seq.logits_from - seq.n_computed, 0) + scores)
        return n

    cdef int _push_chunk(self, Prefilling h, int n) except -1:
        """Add the row; returns how many scored logits rows it takes."""
        cdef const Sequence* seq = self._table.prefilling(h)
        self._table.reach(h, n)
        self._row_id[self.view.n_rows] = seq.id
        MIRO_INDEX(self.view.n_rows - self._n_decode, self.view.max_rows)
        self._chunk_row[self.view.n_rows - self._n_decode] = h
        cdef int rows = self._table.push_chunk(h, self.view, n)
        return rows if 0 <= seq.logits_from < seq.n_computed + n else 0

    def planned(self):
        """Sequence ids of the last plan's rows, in order; decode rows come first."""
        return [self._row_id[i] for i in range(self.view.n_rows)]

    def commit(self, const int32_t[::1] sampled not None, double seconds):
        """Take in the last plan's step.

        sampled: int32 [rows], the token drawn from the last logits row of row i, or -1 for none: the chunk ends
        before its sequence does, or the sequence is to be finished instead, or to be resumed when its family is as
        far. seconds: how long the step took.
        Rows whose sequence was finished since the plan are skipped. Raises ValueError and changes nothing when there
        is no plan to commit or `sampled` does not fit it.
        """
        cdef int i, n_prompt = 0
        cdef int64_t prompt_keys = 0, n
        if not self._is_planned:
            raise ValueError("commit without a plan")
        if sampled.shape[0] != self.view.n_rows:
            raise ValueError(f"{sampled.shape[0]} sampled tokens for {self.view.n_rows} rows")
        for i in range(self.view.n_rows):
            self._check_sampled(i, sampled[i])
            if i >= self._n_decode:
                n = self.view.n_tok[i]
                n_prompt += self.view.n_tok[i]
                prompt_keys += n * self.view.first_pos[i] + n * (n + 1) // 2
        self._budget.observe(self._n_decode, self._decode_keys, n_prompt, prompt_keys, seconds)
        self._is_planned = False
        self.view.copies_made()
        cdef double now = self._clock()
        for i in range(self.view.n_rows):
            if i < self._n_decode:
                self._commit_decode(self._decode_row[i], sampled[i])
            else:
                self._commit_chunk(self._chunk_row[i - self._n_decode], self.view.n_tok[i], sampled[i], now)

    cdef int _check_sampled(self, int row, int token) except -1:
        cdef const Sequence* seq
        if token == -1 or not self._sets.is_live(self._row_id[row]):
            return 0
        seq = self._sets.find(self._row_id[row])
        if token < -1 or seq.n_computed + self.view.n_tok[row] != seq.n_tokens or seq.n_tokens == seq.capacity:
            raise ValueError(f"row {row} (sequence {seq.id}) cannot take token {token}")
        return 0

    cdef int _commit_decode(self, Decoding h, int token) except -1:
        if self._table.holds_decoding(h):
            self._table.advance_decoding(h)
            if token >= 0:
                self._table.append(h, token)
                self._policy.charge(self._table.decoding(h).family, 0, 1)
        return 0

    cdef int _commit_chunk(self, Prefilling h, int n_tok, int token, double now) except -1:
        if self._table.holds_prefilling(h):
            self._table.advance_prefilling(h, n_tok)
            if token >= 0:
                self._policy.charge(self._table.prefilling(h).family, 0, 1)
                self._sets.start_decoding(h, token, now)
        return 0

    def finish(self, seq):
        """End a live sequence in whatever state it is: its blocks are free at once and its id is forgotten.

        Raises InternalError when no live sequence has that id.
        """
        cdef int64_t family = self._sets.find(seq).family
        if self._sets.find(seq).order < 0:
            self._policy.remove(seq)
            self._rate.left(self._clock())
        self._sets.finish(seq)
        if self._families.leave(family):
            self._policy.forget(family)
