"""SequenceBlocks, see blocks.pxd."""

import numpy as np

from miro_cy.errors import InternalError

from miro_cy.cache.block_table cimport NO_BLOCK
from miro_cy.native cimport MIRO_INDEX
from miro_cy.sched.sequence cimport cached_tokens, stored_limit, to_compute


cdef class SequenceBlocks:
    """Between the entries of a SequenceTable and the pool, for n_slots sequences at once. One thread."""

    def __cinit__(self, BlockPool pool not None, BlockTables tables not None, int n_slots, bint reserving):
        self.pool = pool
        self.tables = tables
        self.windows = GroupWindows(pool, tables)
        self.reserving = reserving
        self.n_slots_free = n_slots
        self._free_slot = np.arange(n_slots, dtype=np.int32)[::-1].copy()
        self._sharing = None if pool.index is None else PrefixSharing(pool, tables)

    cdef bytes domain(self, extras):
        """What keeps the blocks of sequences with other extras apart, see PrefixIndex."""
        return b"" if self._sharing is None else self.pool.index.domain(extras)

    cdef void begin_plan(self) noexcept:
        """The rows expected so far belong to no step."""
        if self._sharing is not None:
            self._sharing.expect_nothing()

    # --- admission -----------------------------------------------------------------------------------------------

    cdef int to_admit(self, Sequence* seq) except -1:
        """Blocks that `admit` takes of the available ones: all it needs but those of others that it can share.

        What is cached counts: once it is taken it is available no longer.
        """
        cdef int[2] owned
        cdef int end = self._hits(seq, owned)
        return self.windows.to_start(end * self.pool.block_size, self._tokens_at_first(seq)) - owned[0] - owned[1]

    cdef int to_promise(self, Sequence* seq) except -1:
        """Blocks that must be there for it so that it never has to wait for one: those of groups without a window that
        it does not share, and the most that it will hold in the others, sharing or not."""
        cdef int[2] owned
        self._hits(seq, owned)
        cdef int stored = stored_limit(seq)
        return self.windows.most(stored, False) - owned[0] + self.windows.most(stored, True)

    cdef int admit(self, Sequence* seq) except -1:
        """Give it a slot and its blocks, from the prefix index where it has them. InternalError without room for it."""
        cdef int need = self.to_admit(seq)
        if self.n_slots_free == 0:
            raise InternalError("all block table slots are taken")
        self._check_available(seq, need)
        self._take_slot(seq)
        self.catch_up(seq)
        self.windows.start(seq.table_slot, seq.n_computed, self._tokens_at_first(seq))
        return 0

    cdef int _check_available(self, const Sequence* seq, int need) except -1:
        if need > self.pool.available():
            raise InternalError(f"sequence {seq.id} needs {need} more KV blocks, {self.pool.available()} are available")
        return 0

    cdef int _take_slot(self, Sequence* seq) except -1:
        self.n_slots_free -= 1
        seq.table_slot = self._free_slot[self.n_slots_free]
        return 0

    cdef int _tokens_at_first(self, const Sequence* seq) noexcept:
        """What its tables have room for when it is admitted, as far as windows reach: its tokens and the next one, or
        all that may come."""
        cdef int limit = stored_limit(seq)
        return limit if self.reserving else min(seq.n_tokens + 1, limit)

    cdef int _hits(self, Sequence* seq, int[2] owned) except -1:
        """Leading blocks that it would find, and how many others hold (see PrefixSharing)."""
        owned[0] = owned[1] = 0
        if self._sharing is None:
            return 0
        return self._sharing.hits(&seq.chain, seq.tokens, self._may_borrow(seq), owned)

    # --- what others compute -------------------------------------------------------------------------------------

    cdef int catch_up(self, Sequence* seq) except -1:
        """Take what others have computed of its next blocks; returns the tokens that it need not compute."""
        cdef int end, skipped
        if self._sharing is None:
            return 0
        end = self._sharing.borrow(&seq.chain, seq.tokens, seq.table_slot, self._may_borrow(seq))
        skipped = max(0, end * self.pool.block_size - seq.n_computed)
        seq.n_computed += skipped
        seq.n_borrowed += skipped
        return skipped

    cdef int expect(self, Sequence* seq, int n_tok) except -1:
        """The step being planned computes its next n_tok tokens."""
        if self._sharing is not None:
            # Not what is scored: that advances slowly, and nobody shall wait for it.
            self._sharing.expect(
                &seq.chain, seq.tokens,
                min((seq.n_computed + n_tok) // self.pool.block_size, self._may_borrow(seq)))
        return 0

    cdef bint is_awaiting(self, Sequence* seq) except -1:
        """Whether the step being planned completes a block that it can take afterwards, instead of computing it."""
        if seq.chain.n_shared >= self._may_borrow(seq):
            return False
        return self._sharing.expects(&seq.chain, seq.tokens)

    cdef int publish(self, Sequence* seq) except -1:
        """Its n_computed tokens are in the KV cache."""
        if self._sharing is not None:
            # Only here does a block become findable: its step is over, and what speculation rejects is never advanced.
            self._sharing.publish(&seq.chain, seq.tokens, seq.table_slot, seq.n_computed // self.pool.block_size)
        return self.windows.roll(seq.table_slot, seq.n_computed)

    cdef int _may_borrow(self, const Sequence* seq) noexcept:
        """Leading blocks that it need not compute: those before its last token, and before its first scored one."""
        if self._sharing is None:
            return 0
        cdef int end = seq.n_tokens - 1
        if seq.logits_from >= 0:
            end = min(end, seq.logits_from)
        return end // self.pool.block_size

    # --- what it computes itself ---------------------------------------------------------------------------------

    cdef int to_chunk(self, const Sequence* seq, int n_tok) except -1:
        """Blocks that `reach` takes."""
        return self.tables.missing(seq.table_slot, self.pool.blocks_for(seq.n_computed + n_tok))

    cdef int reach(self, const Sequence* seq, int n_tok) except -1:
        """Make room for its next n_tok tokens; returns the blocks taken. InternalError when the pool has too few."""
        return self.tables.extend(self.pool, seq.table_slot, self.pool.blocks_for(seq.n_computed + n_tok))

    cdef int trim(self, const Sequence* seq) except -1:
        """Give back what was taken for a chunk that came to nothing."""
        return self.windows.trim(seq.table_slot, stored_limit(seq))

    cdef int to_grow(self, const Sequence* seq) except -1:
        """Blocks that `grow` takes."""
        cdef int rolling = self._tokens_to_hold(seq, True), others = self._tokens_to_hold(seq, False)
        return self.windows.to_grow(seq.table_slot, rolling, others) + self._to_own(seq)

    cdef int grow(self, const Sequence* seq, BatchView view) except -1:
        """Make room for its last token, in a block of its own: one that it shared is copied by the view's forward pass.

        Returns the blocks taken. InternalError when the pool has too few.
        """
        cdef int group, block, at = seq.n_computed // self.pool.block_size, need = self.to_grow(seq)
        if need == 0:
            return 0
        self._check_available(seq, need)
        if self._to_own(seq) > 0:
            for group in range(self.tables.n_groups):
                block = self.tables.own(self.pool, group, seq.table_slot, at)
                if block != NO_BLOCK:
                    view.push_copy(group, block, self.tables.table[group, seq.table_slot, at])
        self.windows.grow(seq.table_slot, self._tokens_to_hold(seq, True), self._tokens_to_hold(seq, False))
        return need

    cdef int _tokens_to_hold(self, const Sequence* seq, bint rolling) noexcept:
        """What its tables with a window, or without, must have room for before its last token is computed."""
        return stored_limit(seq) if self.reserving and not rolling else min(seq.n_tokens, stored_limit(seq))

    cdef int _to_own(self, const Sequence* seq) except -1:
        """Blocks that it must take in place of shared ones before its last token is computed."""
        if to_compute(seq) < 1:
            return 0
        return self.tables.to_own(self.pool, seq.table_slot, seq.n_computed // self.pool.block_size)

    # --- forks, and the end --------------------------------------------------------------------------------------

    cdef int to_fork(self, const Sequence* source) except -1:
        """Blocks that a fork takes at once: none, unless they are reserved; then all but the full ones that it shares,
        and of a group with a window the one that it writes next."""
        cdef int limit = stored_limit(source)
        if not self.reserving or source.n_computed >= limit:
            return 0
        return self.windows.n_rolling + (self.tables.n_groups - self.windows.n_rolling) * (
            self.pool.blocks_for(limit) - source.n_computed // self.pool.block_size)

    cdef int share(self, const Sequence* source, Sequence* seq) except -1:
        """Give a fork a slot and all that its sequence has computed. There must be a slot."""
        self._take_slot(seq)
        seq.chain.n_shared = source.chain.n_shared
        self.tables.fork(self.pool, source.table_slot, seq.table_slot, self.pool.blocks_for(source.n_computed))
        return 0

    cdef int give_back(self, Sequence* seq) except -1:
        """Its slot and blocks are for others; it has nothing computed."""
        MIRO_INDEX(seq.table_slot, self.tables.n_slots)
        self.tables.free(self.pool, seq.table_slot)
        self._free_slot[self.n_slots_free] = seq.table_slot
        self.n_slots_free += 1
        seq.n_cached = cached_tokens(seq)
        seq.table_slot = -1
        seq.n_computed = seq.n_borrowed = seq.chain.n_shared = 0
        return 0

    # --- what must hold ------------------------------------------------------------------------------------------

    cdef int check_one(self, const Sequence* seq) except -1:
        """Raise AssertionError unless a running sequence has the blocks that it must have."""
        cdef int full = seq.n_computed // self.pool.block_size
        if self.tables.missing(seq.table_slot, self.pool.blocks_for(seq.n_computed)) > 0:
            raise AssertionError(f"sequence {seq.id} has computed tokens outside its blocks")
        self.windows.check(seq.table_slot, seq.n_computed)
        if self._sharing is not None and seq.chain.n_shared != full:
            raise AssertionError(f"sequence {seq.id} shares {seq.chain.n_shared} of its {full} full blocks")
        return 0

    cdef int check(self, set slots) except -1:
        """Raise AssertionError unless slots and blocks agree. slots: those of all running sequences."""
        cdef int i
        free_slots = {self._free_slot[i] for i in range(self.n_slots_free)}
        if len(free_slots) != self.n_slots_free or slots & free_slots:
            raise AssertionError("a block table slot has two owners")
        for i in range(self.tables.n_slots):
            if i not in slots and self.tables.length(i) > 0:
                raise AssertionError(f"table slot {i} holds blocks and has no owner")
        self.pool.check(self.tables.holders(self.pool.n_blocks), self.tables.window[0] == 0)
        return 0
