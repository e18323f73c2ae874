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


def test_a_fork_copies_ids_and_counts_holders() -> None:
    pool, tables = BlockPool(10, 4), BlockTables(2, 3, 4)
    tables.extend(pool, 0, 3)
    assert tables.fork(pool, 0, 2, 2) == 4
    assert tables.array[:, 2].tolist() == [[*blocks[:2], -1, -1] for blocks in tables.array[:, 0].tolist()]
    assert pool.n_free == 4
    pool.check(tables.holders(10))
    tables.free(pool, 0)
    assert pool.n_free == 6, "what the fork holds stays"
    for source, target, n_blocks in ((2, 2, 1), (0, 2, 0), (2, 1, 3), (2, 1, -1)):
        with pytest.raises(InternalError, match="cannot take"):
            tables.fork(pool, source, target, n_blocks)
    tables.free(pool, 2)
    assert pool.n_free == 10


def test_copy_on_write_gives_a_block_of_its_own_and_names_the_source() -> None:
    pool, tables = BlockPool(4, 4), BlockTables(1, 3, 4)
    tables.extend(pool, 0, 2)
    tables.fork(pool, 0, 1, 2)
    shared = tables.array[0, 0].tolist()
    assert tables.own(pool, 0, 1, 1) == shared[1]
    assert tables.array[0, 0].tolist() == shared
    assert tables.array[0, 1, 0] == shared[0]
    assert tables.array[0, 1, 1] not in shared
    assert tables.own(pool, 0, 1, 1) == -1, "it is its own already"
    pool.check(tables.holders(4))
    tables.fork(pool, 0, 2, 2)
    tables.own(pool, 0, 2, 0)
    with pytest.raises(InternalError, match="no block left"):
        tables.own(pool, 0, 2, 1)
    for at in (-1, 2):
        with pytest.raises(InternalError, match="no block"):
            tables.own(pool, 0, 1, at)
    pool.check(tables.holders(4))


def test_a_block_is_shared_behind_the_last_or_in_place_of_another() -> None:
    pool, tables = BlockPool(6, 4), BlockTables(1, 2, 3)
    tables.extend(pool, 0, 2)
    first, second = tables.array[0, 0, :2].tolist()
    assert tables.share(pool, 0, 1, 0, first) == 1
    tables.extend(pool, 1, 3)
    assert tables.share(pool, 0, 1, 1, second) == 3
    assert pool.n_free == 3, "the block that was there before is free again"
    for at in (-1, 3):
        with pytest.raises(InternalError, match="no place"):
            tables.share(pool, 0, 1, at, first)
    with pytest.raises(InternalError, match="free already"):
        tables.share(pool, 0, 1, 2, 5)
    pool.check(tables.holders(6))


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


@settings(max_examples=100, deadline=None)
@given(
    n_groups=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["extend", "free", "fork", "own"]), st.integers(0, 3), st.integers(0, 5)), max_size=50
    ),
)
def test_any_order_of_growth_forks_writes_and_freeing_conserves(
    n_groups: int, steps: list[tuple[str, int, int]]
) -> None:
    pool, tables = BlockPool(17, 4), BlockTables(n_groups, 4, 5)
    for what, slot, n in steps:
        before = tables.array.copy()
        if what == "free":
            tables.free(pool, slot)
        elif what == "extend" and tables.missing(slot, n) <= pool.available():
            tables.extend(pool, slot, n)
            assert tables.length(slot) >= n
        elif what == "fork" and tables.length(n % 4) == 0 and slot != n % 4:
            tables.fork(pool, slot, n % 4, tables.length(slot))
            assert (tables.array[:, n % 4] == tables.array[:, slot]).all()
        elif what == "own" and n < tables.length(slot) and pool.available() >= 1:
            source = tables.own(pool, 0, slot, n)
            assert pool.refcount(tables.array[0, slot, n]) == 1
            assert source in (-1, before[0, slot, n])
        others = [s for s in range(4) if s not in (slot, n % 4)]
        assert (tables.array[:, others] == before[:, others]).all(), "nobody else's table changes"
        pool.check(tables.holders(17))
    for slot in range(4):
        tables.free(pool, slot)
    assert pool.n_free == 17
