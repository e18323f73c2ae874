"""Sequences that wait for others of their family: they get their next token later, or their place is taken by one that
joins with tokens of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miro_cy.errors import InternalError

Make = Callable[..., Any]


def decoding(world: Any, n_prompt: int = 10, **more: Any) -> int:
    """A sequence that may become four, once it decodes."""
    seq: int = world.add(n_prompt, 12, choices=4, **more)
    while world.scheduler.state(seq) != "decoding":
        world.step()
    return seq


def hold(world: Any, *held: int) -> None:
    """A step after which these sequences have no token yet."""
    world.on_hold |= {*held}
    world.step()


@pytest.mark.parametrize("prefix", [True, False])
def test_a_token_that_comes_later(make_world: Make, prefix: bool) -> None:
    world = make_world(prefix=prefix)
    seq, other = decoding(world), decoding(world, 3)
    assert not world.scheduler.has_computed(seq)
    hold(world, seq)
    assert world.scheduler.has_computed(seq)
    for _ in range(3):
        assert world.step() == [other], "who waits for a token is not computed, and keeps its blocks"
        world.scheduler.check_integrity()
    world.resume(seq, 5)
    assert world.step() == [seq, other]
    world.run()
    world.check_outputs()


def test_the_first_token_may_come_later_too(make_world: Make) -> None:
    world = make_world()
    other = decoding(world, 3)
    seq = world.add(10, 6, choices=2)
    hold(world, seq)
    while not world.scheduler.has_computed(seq):
        hold(world, seq)
    assert world.scheduler.state(seq) == "prefilling"
    assert world.scheduler.times(seq)[2] is None
    world.now += 1
    world.step()
    world.resume(seq, 5)
    assert world.scheduler.state(seq) == "decoding"
    assert world.scheduler.times(seq)[2] == world.now
    world.fork(seq, 6)
    assert len(world.step()) == 3
    assert world.scheduler.is_live(other)
    world.run()
    world.check_outputs()


def test_only_who_has_computed_all_can_be_resumed(make_world: Make) -> None:
    world = make_world()
    seq = decoding(world)
    with pytest.raises(InternalError, match="cannot take token 5"):
        world.scheduler.resume(seq, 5)
    long = world.add(50, 3)
    world.step()
    with pytest.raises(InternalError, match="cannot take token 5"):
        world.scheduler.resume(long, 5)
    waiting = world.add(5, 3)
    with pytest.raises(InternalError, match="has no use for a token"):
        world.scheduler.resume(waiting, 5)
    hold(world, seq)
    with pytest.raises(InternalError, match="cannot take token -1"):
        world.scheduler.resume(seq, -1)
    world.plan()
    for call in (lambda: world.scheduler.resume(seq, 5), lambda: world.join(seq, [1])):
        with pytest.raises(ValueError, match="before the step is committed"):
            call()


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("parent", ["decodes", "waits", "ends"])
def test_who_joins_a_family_computes_its_own_tokens(make_world: Make, prefix: bool, parent: str) -> None:
    world = make_world(prefix=prefix)
    seq = decoding(world, salt=b"s")
    if parent == "waits":
        hold(world, seq)
    joined = world.join(seq, [3, 1, 4])
    assert world.scheduler.state(joined) == "queued"
    assert world.scheduler.times(joined)[:2] == world.scheduler.times(seq)[:2]
    if parent == "ends":
        world.scheduler.finish(seq)
        assert world.join(joined, [2]) > joined, "somebody of the family is still there"
    world.scheduler.check_integrity()
    if parent == "waits":
        world.step()
        world.resume(seq, 8)
    world.run()
    world.check_outputs()


def test_who_joins_waits_behind_its_family_and_before_others(make_world: Make) -> None:
    world = make_world(max_num_seqs=2)
    seq = decoding(world)
    late = world.add(5, 3)
    fork = world.fork(seq, 1)
    first, second = world.join(seq, [2]), world.join(seq, [3])
    with pytest.raises(InternalError, match="all its 4 sequences"):
        world.join(seq, [4])
    world.scheduler.check_integrity()
    began: list[int] = []
    while world.live():
        began += [one for one in world.step() or [] if one not in began]
        world.scheduler.check_integrity()
    assert began == [seq, fork, first, second, late]
    world.check_outputs()


def test_newer_ones_give_way_to_who_joins(make_world: Make) -> None:
    """Else they could have the blocks that it waits for until they end, and be admitted again before it."""
    world = make_world()
    seq, young, younger = decoding(world), decoding(world, 3), decoding(world, 4)
    joined = world.join(seq, [2])
    assert [world.scheduler.state(one) for one in (seq, joined, young, younger)] == ["decoding", *["queued"] * 3]
    assert world.scheduler.preemptions == 2
    world.scheduler.check_integrity()
    assert world.step() == [seq, joined, young, younger]
    world.run()
    world.check_outputs()


def test_who_joins_waits_behind_older_families(make_world: Make) -> None:
    world = make_world()
    old, young = decoding(world), decoding(world, 5)
    first, second, third = world.join(young, [1]), world.join(old, [2]), world.join(young, [3])
    world.scheduler.check_integrity()
    assert world.step() == [old, second, young, first, third]
    world.run()
    world.check_outputs()


def test_a_plan_that_computes_nothing_is_in_nobodys_way(make_world: Make) -> None:
    world = make_world()
    seq = decoding(world)
    hold(world, seq)
    for token in (5, 6):
        assert world.step() is None
        world.resume(seq, token)
        hold(world, seq)
    assert world.step() is None
    joined, fork = world.join(seq, [2]), world.fork(seq, 3)
    assert world.step() == [joined, fork]
    world.run()
    world.check_outputs()


def test_what_cannot_join(make_world: Make) -> None:
    world = make_world()
    seq = decoding(world)
    with pytest.raises(InternalError, match="no sequence of 10 tokens can join"):
        world.scheduler.join(seq, np.arange(10, dtype=np.int32))
    with pytest.raises(InternalError, match="no sequence of 23 tokens can join"):
        world.scheduler.join(seq, np.arange(23, dtype=np.int32))
    with pytest.raises(InternalError, match="no live sequence"):
        world.scheduler.join(99, np.arange(12, dtype=np.int32))
    waiting = world.add(5, 3, choices=2)
    with pytest.raises(InternalError, match="never admitted"):
        world.scheduler.join(waiting, np.arange(7, dtype=np.int32))
    forks = [world.fork(seq, token) for token in (1, 2, 3)]  # what was refused took no place
    assert len(forks) == 3
    world.run()
    world.check_outputs()
