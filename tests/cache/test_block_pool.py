"""BlockPool: conservation (promise 3), reference counts, refusal of misuse."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.errors import ConfigError, InternalError


def test_gives_every_block_once_then_refuses() -> None:
    pool = BlockPool(5, 16)
    assert sorted(pool.alloc() for _ in range(5)) == [0, 1, 2, 3, 4]
    assert pool.n_free == pool.available() == 0
    with pytest.raises(InternalError, match="no block left"):
        pool.alloc()
    pool.check(np.ones(5, np.int32))


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(4, 16)
    blocks = [pool.alloc() for _ in range(4)]
    for block in (blocks[2], blocks[0], blocks[3]):
        pool.decref(block)
    assert [pool.alloc() for _ in range(3)] == [blocks[3], blocks[0], blocks[2]]


def test_double_free_raises() -> None:
    pool = BlockPool(2, 16)
    block = pool.alloc()
    assert pool.decref(block) == 0
    with pytest.raises(InternalError, match="free already"):
        pool.decref(block)
    with pytest.raises(InternalError, match="free already"):
        pool.share(block)
    pool.check(np.zeros(2, np.int32))


@pytest.mark.parametrize("block", [-1, 2, 2**31 - 1])
def test_blocks_outside_the_pool_are_refused(block: int) -> None:
    pool = BlockPool(2, 16)
    for misuse in (pool.share, pool.decref, pool.refcount):
        with pytest.raises(InternalError, match="outside the pool"):
            misuse(block)


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(1, 16)
    block = pool.alloc()
    assert pool.share(block) == 2
    assert pool.decref(block) == 1
    assert pool.available() == 0
    assert pool.decref(block) == 0
    assert pool.available() == 1


@pytest.mark.parametrize(("field", "sizes"), [("n_blocks", (0, 16)), ("block_size", (4, 0)), ("n_blocks", (2**31, 1))])
def test_sizes_are_checked(field: str, sizes: tuple[int, int]) -> None:
    for make in (BlockPool, PrefixIndex):
        with pytest.raises(ConfigError) as caught:
            make(*sizes)
        assert caught.value.field == field


def test_pool_and_index_have_the_same_sizes() -> None:
    BlockPool(4, 16, PrefixIndex(4, 16))
    for sizes in ((5, 16), (4, 32)):
        with pytest.raises(ConfigError, match="does not fit the pool"):
            BlockPool(4, 16, PrefixIndex(*sizes))
    with pytest.raises(ConfigError, match="hash_bits"):
        PrefixIndex(4, 16, hash_bits=65)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(1, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17, 2**31 - 1)] == [0, 1, 1, 2, 2**27]
    with pytest.raises(ValueError, match="cannot be -1"):
        pool.blocks_for(-1)


def test_check_compares_holders() -> None:
    pool = BlockPool(2, 16)
    block = pool.alloc()
    with pytest.raises(AssertionError, match="reference count 1, holders 0"):
        pool.check(np.zeros(2, np.int32))
    holders = np.zeros(2, np.int32)
    holders[block] = 1
    pool.check(holders)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a counter of who holds what."""

    @initialize(n_blocks=st.integers(1, 9))
    def start(self, n_blocks: int) -> None:
        self.pool = BlockPool(n_blocks, 4)
        self.held: Counter[int] = Counter()

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @precondition(lambda self: self.pool.available() > 0)
    @rule()
    def alloc(self) -> None:
        block = self.pool.alloc()
        assert self.held[block] == 0, "a block was handed out twice"
        self.held[block] = 1

    @precondition(lambda self: self.pool.available() == 0)
    @rule()
    def alloc_from_nothing(self) -> None:
        with pytest.raises(InternalError):
            self.pool.alloc()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = self.pick(data)
        self.held[block] += 1
        assert self.pool.share(block) == self.held[block]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.pick(data)
        self.held[block] -= 1
        assert self.pool.decref(block) == self.held[block]
        self.held = +self.held

    @invariant()
    def conserved(self) -> None:
        holders = np.array([self.held[b] for b in range(self.pool.n_blocks)], np.int32)
        self.pool.check(holders)
        assert self.pool.n_free + self.pool.n_cached + len(self.held) == self.pool.n_blocks
        assert [self.pool.refcount(b) for b in range(self.pool.n_blocks)] == holders.tolist()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
