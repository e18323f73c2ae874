"""SequenceTable at run time: a spent handle raises, a refused transition changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.errors import InternalError
from miro_cy.sched.forks import blocks_to_fork, fork_decoding, fork_queued
from miro_cy.sched.request import SequenceTable, StaleHandle, legal_edges

if TYPE_CHECKING:
    from miro_cy.sched.request import Handle

#: Each transition that takes a handle: the state it takes, its other arguments, the state it returns.
TRANSITIONS = {
    "admit": ("queued", (0.0,), "prefilling"),
    "start_decoding": ("prefilling", (1, 0.0), "decoding"),
    "preempt_prefilling": ("prefilling", (), "queued"),
    "preempt_decoding": ("decoding", (), "queued"),
    "finish_queued": ("queued", (), "finished"),
    "finish_prefilling": ("prefilling", (), "finished"),
    "finish_decoding": ("decoding", (), "finished"),
    "forget": ("finished", (), "nothing"),
}


def test_the_edges_are_those_of_the_design() -> None:
    assert legal_edges() == {(source, target) for source, _, target in TRANSITIONS.values()} | {
        ("nothing", "queued"),
        ("nothing", "decoding"),
    }
    assert len(legal_edges()) == 10


def small_table(n_entries: int = 3, n_slots: int = 2, *, prefix: bool = False) -> SequenceTable:
    pool = BlockPool(8, 4, PrefixIndex(8, 4) if prefix else None)
    return SequenceTable(pool, BlockTables(1, n_slots, 4), n_entries, n_slots)


def new(table: SequenceTable, sequence_id: int = 1, n: int = 5) -> Handle:
    return table.create(sequence_id, np.arange(n, dtype=np.int32), 3, -1, 0.0)


def test_a_spent_handle_raises() -> None:
    table = small_table()
    queued = new(table)
    prefilling = table.admit(queued, 0.0)
    table.advance_prefilling(prefilling, 5)
    decoding = table.start_decoding(prefilling, 7, 0.0)
    again = table.preempt_decoding(decoding)
    finished = table.finish_queued(again)
    table.forget(finished)
    view = BatchView(1, 1, table.tables.array)
    for call in (
        lambda: table.admit(queued, 0.0),
        lambda: table.preempt_prefilling(prefilling),
        lambda: table.grow(decoding, view),
        lambda: table.append(decoding, 1),
        lambda: table.finish_queued(again),
        lambda: table.forget(finished),
        lambda: table.admit({"slot": 99, "generation": 0}, 0.0),
        lambda: table.admit({"slot": -1, "generation": 0}, 0.0),
    ):
        with pytest.raises(StaleHandle):
            call()
    table.check()
    assert table.pool.n_free == 8
    # The entry serves another sequence; the old handles stay dead.
    assert new(table)["slot"] == queued["slot"]
    with pytest.raises(StaleHandle):
        table.admit(queued, 0.0)


def test_a_transition_that_cannot_be_made_leaves_everything_as_it_was() -> None:
    table = small_table(n_slots=1)
    first, second = new(table, 1), new(table, 2)
    prefilling = table.admit(first, 0.0)
    with pytest.raises(InternalError, match="slots are taken"):
        table.admit(second, 0.0)
    with pytest.raises(InternalError, match="cannot take token"):
        table.start_decoding(prefilling, 7, 0.0)
    with pytest.raises(InternalError, match="cannot advance by 6"):
        table.advance_prefilling(prefilling, 6)
    table.check()
    table.finish_prefilling(prefilling)
    table.admit(second, 0.0)
    table.check()


def test_admission_needs_the_whole_of_its_blocks() -> None:
    table = SequenceTable(BlockPool(3, 4), BlockTables(1, 2, 4), 2, 2)
    first, second = new(table, 1), new(table, 2)
    assert table.blocks_to_admit(first) == 2
    table.admit(first, 0.0)
    with pytest.raises(InternalError, match="needs 2 more KV blocks, 1 are available"):
        table.admit(second, 0.0)
    table.check()
    assert table.pool.n_free == 1


def test_admission_takes_what_the_index_has_and_asks_the_pool_for_the_rest() -> None:
    table = small_table(prefix=True)
    first = table.admit(new(table, 1, n=9), 0.0)  # twelve tokens at most: three blocks
    table.advance_prefilling(first, 9)
    second, other = new(table, 2, n=9), new(table, 3, n=2)
    assert table.blocks_to_admit(second) == 1, "two blocks are there already, and in use"
    assert table.blocks_to_admit(other) == 1
    table.finish_prefilling(first)
    assert (table.pool.n_free, table.pool.n_cached) == (6, 2)
    assert table.blocks_to_admit(second) == 3, "in use by nobody they count: they stop being available"
    view = BatchView(4, 16, table.tables.array)
    taken = table.admit(second, 0.0)
    assert table.pool.available() == 5
    table.push_chunk(taken, view, 1)
    assert view.rows() == [(0, 8, 1, 1)], "the last token is computed, whatever is cached"
    table.check()


def test_a_chunk_can_be_awaited_and_caught_up_with() -> None:
    table = small_table(prefix=True)
    view = BatchView(4, 16, table.tables.array)
    first, second = table.admit(new(table, 1, n=9), 0.0), table.admit(new(table, 2, n=9), 0.0)
    assert not table.is_awaiting(second)
    table.push_chunk(first, view, 3)
    assert not table.is_awaiting(second), "three tokens complete no block"
    table.advance_prefilling(first, 3)
    table.push_chunk(first, view, 5)
    assert table.is_awaiting(second)
    assert table.catch_up(second) == 0
    table.advance_prefilling(first, 5)
    assert table.catch_up(second) == 8
    assert table.catch_up(second) == 0
    assert table.tables.array[0, :, :2].tolist() == [table.tables.array[0, 0, :2].tolist()] * 2
    table.check()


def test_rows_are_pushed_from_what_is_not_computed() -> None:
    table = small_table()
    view = BatchView(4, 16, table.tables.array)
    prefilling = table.admit(new(table), 0.0)
    assert table.push_chunk(prefilling, view, 3) == 0
    table.advance_prefilling(prefilling, 3)
    assert table.push_chunk(prefilling, view, 2) == 1
    with pytest.raises(InternalError, match="no 3 tokens to compute"):
        table.push_chunk(prefilling, view, 3)
    table.advance_prefilling(prefilling, 2)
    decoding = table.start_decoding(prefilling, 9, 0.0)
    table.grow(decoding, view)
    assert table.push_next(decoding, view) == 1
    assert view.rows() == [(0, 0, 3, 0), (0, 3, 2, 1), (0, 5, 1, 1)]


def test_a_row_is_not_decoded_without_room() -> None:
    table = small_table()
    view = BatchView(1, 1, table.tables.array)
    decoding = None
    prefilling = table.admit(new(table, n=7), 0.0)  # 7 tokens and the next fill two blocks
    table.advance_prefilling(prefilling, 7)
    decoding = table.start_decoding(prefilling, 9, 0.0)
    table.advance_decoding(decoding)
    table.append(decoding, 9)
    assert table.blocks_to_grow(decoding) == 1
    with pytest.raises(InternalError, match="no room"):
        table.push_next(decoding, view)
    assert table.grow(decoding, view) == 1
    table.push_next(decoding, view)


def decoding_one(table: SequenceTable, n: int = 6) -> Handle:
    """A sequence of n prompt tokens that has just got token 90."""
    prefilling = table.admit(new(table, n=n), 0.0)
    table.advance_prefilling(prefilling, n)
    return table.start_decoding(prefilling, 90, 0.0)


def test_a_fork_shares_all_blocks_until_it_writes() -> None:
    table = small_table()
    view = BatchView(4, 16, table.tables.array)
    lead = decoding_one(table)
    fork = fork_decoding(table, lead, 2, 91, view)
    rows = table.tables.array[0, :2, :3].tolist()
    assert rows[0] == rows[1]
    assert [table.pool.refcount(block) for block in rows[0][:2]] == [2, 2]
    assert (table.blocks_to_grow(lead), table.blocks_to_grow(fork)) == (1, 1)
    with pytest.raises(InternalError, match="no room"):
        table.push_next(lead, view)
    assert (table.grow(lead, view), table.grow(fork, view)) == (1, 0), "the last one keeps the block"
    ((group, source, target),) = view.copies()
    assert (group, source) == (0, rows[0][1])
    assert table.tables.array[0, :2, :2].tolist() == [[rows[0][0], target], rows[0][:2]]
    table.push_next(lead, view)
    table.push_next(fork, view)
    table.check()
    for handle in (lead, fork):
        table.forget(table.finish_decoding(handle))
    assert table.pool.available() == 8


@pytest.mark.parametrize("prefix", [True, False])
def test_a_fork_of_full_blocks_copies_none(prefix: bool) -> None:
    table = small_table(prefix=prefix)
    view = BatchView(4, 16, table.tables.array)
    lead = decoding_one(table, n=4)
    fork = fork_decoding(table, lead, 2, 91, view)
    assert table.grow(lead, view) + table.grow(fork, view) == 1, "the lead took its next block when it was admitted"
    assert view.n_copies == 0
    table.check()


def test_a_fork_takes_its_blocks_at_once_when_they_are_reserved() -> None:
    pool = BlockPool(8, 4)
    table = SequenceTable(pool, BlockTables(1, 4, 4), 4, 4, reserving=True)
    view = BatchView(4, 16, table.tables.array)
    prefilling = table.admit(table.create(1, np.arange(6, dtype=np.int32), 7, -1, 0.0), 0.0)  # 12 tokens to be stored
    table.advance_prefilling(prefilling, 6)
    lead = table.start_decoding(prefilling, 90, 0.0)
    for left, fork in ((5, 2), (3, 3)):
        assert (pool.available(), blocks_to_fork(table, lead)) == (left, 2)
        fork_decoding(table, lead, fork, 91, view)
        assert view.n_copies == fork - 1
    assert [table.blocks_to_grow(lead), table.is_growing(lead["slot"])] == [0, False]
    with pytest.raises(InternalError, match="no room for a fork"):
        fork_decoding(table, lead, 4, 91, view)
    table.check()


def test_a_fork_without_room_is_queued_and_changes_nothing_else() -> None:
    table = small_table()
    lead = decoding_one(table)
    before = table.pool.available()
    fork = fork_queued(table, lead, 2, 91)
    table.check()
    assert table.pool.available() == before
    table.forget(table.finish_decoding(lead))
    assert table.advance_prefilling(table.admit(fork, 0.0), 7) == 0


def test_what_cannot_be_forked_is_refused() -> None:
    table = small_table(n_entries=2, n_slots=1)
    view = BatchView(4, 16, table.tables.array)
    lead = decoding_one(table)
    with pytest.raises(InternalError, match="no room"):
        fork_decoding(table, lead, 2, 91, view)
    with pytest.raises(InternalError, match="token -1"):
        fork_queued(table, lead, 2, -1)
    fork_queued(table, lead, 2, 91)
    with pytest.raises(InternalError, match="entries are taken"):
        fork_queued(table, lead, 3, 91)
    table.check()


def test_the_table_checks_its_sizes() -> None:
    for entries, slots in ((0, 1), (1, 0), (1, 3)):
        with pytest.raises(ValueError, match="no sequence table"):
            SequenceTable(BlockPool(8, 4), BlockTables(1, 2, 4), entries, slots)
    table = small_table(n_entries=1)
    new(table)
    with pytest.raises(InternalError, match="entries are taken"):
        new(table)


class HandleMachine(RuleBasedStateMachine):
    """Any function on any handle ever returned: only the current one of the right state works."""

    @initialize(prefix=st.booleans())
    def start(self, prefix: bool) -> None:
        self.table = small_table(prefix=prefix)
        self.handles: list[tuple[Handle, str, int]] = []  # handle, its state, its sequence
        self.current: dict[int, Handle] = {}
        self.next_id = 0

    @rule(n=st.integers(1, 9))
    def create(self, n: int) -> None:
        if len(self.current) == self.table.n_entries:
            with pytest.raises(InternalError):
                new(self.table, self.next_id, n)
            return
        self.keep(new(self.table, self.next_id, n), "queued", self.next_id)
        self.next_id += 1

    def keep(self, handle: Handle, state: str, sequence: int) -> None:
        self.handles.append((handle, state, sequence))
        self.current[sequence] = handle

    @rule(name=st.sampled_from(sorted(TRANSITIONS)), data=st.data())
    def transition(self, name: str, data: st.DataObject) -> None:
        if not self.handles:
            return
        handle, state, sequence = data.draw(st.sampled_from(self.handles))
        source, extra, target = TRANSITIONS[name]
        good = state == source and self.current.get(sequence) == handle
        try:
            result = getattr(self.table, name)(handle, *extra)
        except StaleHandle:
            assert not good
        except InternalError:
            assert good, "no pool, slot or logits"
        else:
            assert good, f"{name} took a spent or foreign handle"
            del self.current[sequence]
            if name != "forget":
                self.keep(result, target, sequence)

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        if self.handles:
            handle, state, sequence = data.draw(st.sampled_from(self.handles))
            if state == "prefilling" and self.current.get(sequence) == handle:
                while True:
                    try:
                        self.table.advance_prefilling(handle, 1)
                    except InternalError:
                        break

    @rule(queued=st.booleans(), data=st.data())
    def fork(self, queued: bool, data: st.DataObject) -> None:
        if not self.handles:
            return
        handle, state, sequence = data.draw(st.sampled_from(self.handles))
        good = state == "decoding" and self.current.get(sequence) == handle
        view = BatchView(4, 16, self.table.tables.array)
        try:
            if queued:
                fork = fork_queued(self.table, handle, self.next_id, 5)
            else:
                fork = fork_decoding(self.table, handle, self.next_id, 5, view)
        except StaleHandle:
            assert not good
        except InternalError:
            assert len(self.current) == self.table.n_entries or not queued
        else:
            assert good, "a spent or foreign handle was forked"
            self.keep(fork, "queued" if queued else "decoding", self.next_id)
            self.next_id += 1

    @invariant()
    def whole(self) -> None:
        self.table.check()


TestHandleMachine = HandleMachine.TestCase
TestHandleMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
