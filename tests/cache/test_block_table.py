"""BlockTables: growth is all or nothing, freeing gives everything back, one shared array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.errors import ConfigError, InternalError


def test_extend_fills_the_array_in_place() -> None:
    pool, tables = BlockPool(8, 4), BlockTables(1, 2, 4)
    array = tables.array
    assert array.shape == (1, 2, 4)
    assert array.dtype == np.int32
    assert tables.extend(pool, 1, 3) == 3
    assert array[0, 1].tolist() == [0, 1, 2, -1]  # the same memory, seen without asking again
    assert tables.extend(pool, 1, 2) == 0, "tables never shrink by extending"
    assert tables.length(1) == 3
    assert tables.length(0) == 0


def test_extend_takes_all_groups_or_nothing() -> None:
    pool, tables = BlockPool(5, 4), BlockTables(2, 1, 4)
    assert tables.missing(0, 2) == 4
    tables.extend(pool, 0, 2)
    assert pool.n_free == 1
    with pytest.raises(InternalError, match="needs 2 more KV blocks, 1 are available"):
        tables.extend(pool, 0, 3)
    assert pool.n_free == 1
    assert tables.length(0) == 2
    pool.check(tables.holders(5))


def test_free_gives_everything_back_once() -> None:
    pool, tables = BlockPool(6, 4), BlockTables(2, 2, 3)
    tables.extend(pool, 0, 3)
    assert tables.free(pool, 0) == 6
    assert pool.n_free == 6
    assert (tables.array == -1).all()
    assert tables.free(pool, 0) == 0
    pool.check(tables.holders(6))


@pytest.mark.parametrize(("slot", "n_blocks"), [(-1, 1), (2, 1), (0, 5)])
def test_what_is_outside_the_tables_is_refused(slot: int, n_blocks: int) -> None:
    pool, tables = BlockPool(8, 4), BlockTables(1, 2, 4)
    with pytest.raises(InternalError):
        tables.extend(pool, slot, n_blocks)
    assert pool.n_free == 8


@pytest.mark.parametrize(
    ("field", "sizes"), [("n_groups", (0, 1, 1)), ("n_slots", (1, 0, 1)), ("max_blocks", (1, 1, 0))]
)
def test_sizes_are_checked(field: str, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        BlockTables(*sizes)
    assert caught.value.field == field


def test_a_corrupt_table_is_found() -> None:
    pool, tables = BlockPool(4, 4), BlockTables(1, 1, 4)
    tables.extend(pool, 0, 1)
    tables.array[0, 0, 2] = 3
    with pytest.raises(AssertionError, match="past its end"):
        tables.holders(4)
    tables.array[0, 0, 2] = -1
    tables.array[0, 0, 0] = 4
    with pytest.raises(AssertionError, match="block 4 of 4"):
        tables.holders(4)


@settings(max_examples=60, deadline=None)
@given(
    n_groups=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40),
)
def test_any_order_of_growth_and_freeing_conserves(n_groups: int, steps: list[tuple[int, int]]) -> None:
    pool, tables = BlockPool(17, 4), BlockTables(n_groups, 4, 5)
    for slot, n_blocks in steps:
        if n_blocks == 0:
            tables.free(pool, slot)
        elif tables.missing(slot, n_blocks) <= pool.available():
            tables.extend(pool, slot, n_blocks)
            assert tables.length(slot) >= n_blocks
        pool.check(tables.holders(17))
        live = tables.array[tables.array >= 0]
        assert len(set(live.tolist())) == live.size, "two tables own one block"
    for slot in range(4):
        tables.free(pool, slot)
    assert pool.n_free == 17
