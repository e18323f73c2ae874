"""Windows in blocks: how many a sequence needs, and tables that give back their beginning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.windows import GroupWindows, blocks_needed, tokens_within
from miro_cy.errors import ConfigError, InternalError


def counted(window: int, n_tokens: int, size: int) -> int:
    """The most blocks between the first key that a query sees and itself, over all queries."""
    return max((p // size - max(0, p - window + 1) // size + 1 for p in range(n_tokens)), default=0)


@settings(max_examples=300, deadline=None)
@given(window=st.integers(1, 40), n_tokens=st.integers(0, 80), size=st.integers(1, 16))
def test_what_a_window_needs_is_what_its_queries_see(window: int, n_tokens: int, size: int) -> None:
    assert blocks_needed([window], n_tokens, size) == counted(window, n_tokens, size)
    assert blocks_needed([0], n_tokens, size) == -(-n_tokens // size)
    both = counted(window, n_tokens, size) + -(-n_tokens // size)
    assert blocks_needed([0, window], n_tokens, size) == both


@settings(max_examples=200, deadline=None)
@given(
    windows=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    n_blocks=st.integers(0, 20),
    size=st.integers(1, 8),
    limit=st.integers(0, 100),
)
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    windows: list[int], n_blocks: int, size: int, limit: int
) -> None:
    longest = tokens_within(windows, n_blocks, size, limit)
    assert blocks_needed(windows, longest, size) <= n_blocks
    assert longest == limit or blocks_needed(windows, longest + 1, size) > n_blocks


def test_a_pool_serves_any_length_when_all_layers_have_a_window() -> None:
    pool, tables = BlockPool(9, 32), BlockTables(2, 1, 1000, (64, 100))
    assert GroupWindows(pool, tables).capacity() == 32_000
    assert GroupWindows(BlockPool(7, 32), tables).capacity() == 128
    assert GroupWindows(pool, BlockTables(2, 1, 1000, (0, 64))).capacity() == 6 * 32


def test_entries_before_a_window_are_given_back() -> None:
    pool, tables = BlockPool(8, 4), BlockTables(2, 2, 4, (0, 5))
    tables.extend(pool, 0, 4)
    blocks = tables.array[:, 0].tolist()
    assert tables.give_back(pool, 1, 0, 2) == 2
    assert tables.array[:, 0].tolist() == [blocks[0], [-1, -1, *blocks[1][2:]]]
    assert (tables.start(1, 0), tables.held(1, 0), tables.held(0, 0), tables.length(0)) == (2, 2, 4, 4)
    assert tables.give_back(pool, 1, 0, 1) == 0, "a table's beginning never moves back"
    assert tables.missing(0, 4) == 0, "what was given back is not missing"
    pool.check(tables.holders(8))
    for call in (lambda: tables.share(pool, 1, 0, 1, blocks[0][0]), lambda: tables.own(pool, 1, 0, 1)):
        with pytest.raises(InternalError, match=r"no place 1|no block 1"):
            call()
    assert tables.free(pool, 0) == 6
    assert (tables.start(1, 0), tables.length(0)) == (0, 0)
    pool.check(tables.holders(8))


def test_a_table_can_begin_behind_its_end() -> None:
    """A sequence that finds all before its window in the prefix index never held that."""
    pool, tables = BlockPool(6, 4), BlockTables(1, 1, 6, (4,))
    assert tables.give_back(pool, 0, 0, 3) == 0
    assert tables.extend(pool, 0, 5) == 2
    assert tables.array[0, 0, :3].tolist() == [-1] * 3
    assert tables.shorten(pool, 0, 0, 4) == 1
    assert (tables.length(0), tables.held(0, 0), pool.n_free) == (4, 1, 5)
    with pytest.raises(InternalError, match="begins at 3 cannot end at 2"):
        tables.shorten(pool, 0, 0, 2)
    with pytest.raises(InternalError, match="cannot begin at 7"):
        tables.give_back(pool, 0, 0, 7)
    pool.check(tables.holders(6))


def test_a_fork_begins_where_its_source_does() -> None:
    pool, tables = BlockPool(8, 4), BlockTables(2, 2, 4, (0, 5))
    tables.extend(pool, 0, 4)
    tables.give_back(pool, 1, 0, 2)
    assert tables.fork(pool, 0, 1, 3) == 3 + 1
    assert tables.array[1, 1].tolist() == [-1, -1, tables.array[1, 0, 2], -1]
    pool.check(tables.holders(8))
    tables.free(pool, 0)
    tables.free(pool, 1)
    assert pool.n_free == 8


def test_a_block_before_the_beginning_is_found() -> None:
    pool, tables = BlockPool(4, 4), BlockTables(1, 1, 4, (3,))
    tables.extend(pool, 0, 2)
    tables.give_back(pool, 0, 0, 1)
    tables.array[0, 0, 0] = 3
    with pytest.raises(AssertionError, match="names block 3 before its start"):
        tables.holders(4)


@pytest.mark.parametrize("windows", [(1, 2), (-1,), (2**30,)])
def test_windows_are_checked(windows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        BlockTables(1, 1, 1, windows)
    assert caught.value.field == "windows"


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["extend", "roll", "free", "cut"]), st.integers(0, 6)), max_size=60))
def test_any_order_of_growth_and_giving_back_conserves(steps: list[tuple[str, int]]) -> None:
    pool, tables = BlockPool(14, 4), BlockTables(2, 2, 6, (0, 5))
    for i, (what, n) in enumerate(steps):
        slot = i % 2
        if what == "extend" and tables.missing(slot, n) <= pool.available():
            tables.extend(pool, slot, n)
        elif what == "roll":
            tables.give_back(pool, 1, slot, n)
        elif what == "cut" and n >= tables.start(1, slot):
            tables.shorten(pool, 1, slot, n)
        elif what == "free":
            tables.free(pool, slot)
        pool.check(tables.holders(14))
        assert pool.n_free + sum(tables.held(g, s) for g in range(2) for s in range(2)) == 14
        assert np.array_equal(tables.array[1, slot] >= 0, _between(tables, slot))


def _between(tables: BlockTables, slot: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    start, at = tables.start(1, slot), np.arange(6)
    return (at >= start) & (at < start + tables.held(1, slot))
