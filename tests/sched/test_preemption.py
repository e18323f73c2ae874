"""The pool runs out or a sequence is cancelled: who gives way, who returns, what is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miro_cy.errors import InternalError, Unschedulable

Make = Callable[..., Any]


def test_the_newest_is_preempted_and_nothing_overtakes_it(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old, new = world.add(7, 20), world.add(7, 20)
    while world.scheduler.preemptions == 0:
        world.step()
    assert world.scheduler.state(new) == "queued"
    assert world.scheduler.num_computed(new) == 0
    tiny = world.add(1, 1)  # would fit, but came later
    while old not in world.outputs:
        assert world.step() == [old]
    assert world.scheduler.state(tiny) == "queued"
    world.run()
    assert world.scheduler.preemptions == 1
    assert list(world.outputs) == [old, tiny, new]
    world.check_outputs()


def test_a_preempted_sequence_returns_only_when_all_its_tokens_fit(make_world: Make) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old, new = world.add(7, 20), world.add(7, 20)
    while world.scheduler.preemptions == 0:
        world.step()
    need = world.pool.blocks_for(len(world.scheduler.tokens(new)) + 1)
    while old not in world.outputs:
        assert world.pool.available() < need + 1, "a block is kept for the one that runs"
        world.step()
    assert world.step() == [new], "the first step after the pool is free"


@pytest.mark.parametrize(("max_new", "admitted"), [(20, False), (2, True)])
def test_a_block_is_kept_for_a_sequence_that_may_still_grow(make_world: Make, max_new: int, admitted: bool) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32)
    old = world.add(7, max_new)  # two blocks now; with 20 to come it will want more, with 2 it will not
    world.step()
    new = world.add(23, 2)  # exactly the six that are left
    assert world.step() == ([old, new] if admitted else [old])
    world.run()
    assert world.scheduler.preemptions == 0


def test_rows_keep_the_order_of_arrival_when_a_younger_prompt_is_done_first(make_world: Make) -> None:
    world = make_world(max_score_tokens=4)
    old, young = world.add(10, 9, logits_from=0), world.add(3, 9)
    world.step()
    assert [world.scheduler.state(s) for s in (old, young)] == ["prefilling", "decoding"]
    while world.scheduler.state(old) != "decoding":
        world.step()
    assert world.step() == [old, young]
    world.run()
    world.check_outputs()


def test_the_newest_is_preempted_whatever_its_state(make_world: Make) -> None:
    world = make_world(n_blocks=7, block_size=4, max_context=32, max_score_tokens=1)
    old, scored, young = world.add(7, 20), world.add(12, 1, logits_from=0), world.add(3, 9)
    while world.scheduler.preemptions == 0:
        world.step()
    states = [world.scheduler.state(s) for s in (old, scored, young)]
    assert states == ["decoding", "prefilling", "queued"]
    world.run()
    world.check_outputs()


def test_two_prompts_of_60_percent_run_one_after_the_other(make_world: Make) -> None:
    world = make_world(n_blocks=10, block_size=4, max_context=40)
    first, second = world.add(24, 8), world.add(24, 8)
    world.run()
    assert list(world.outputs) == [first, second]
    assert world.scheduler.preemptions == 0
    world.check_outputs()


def test_many_in_a_pool_for_one_all_end(make_world: Make) -> None:
    world = make_world(n_blocks=16, block_size=4, max_context=64, max_step_tokens=16)
    for n_prompt in (1, 17, 30, 3, 62, 20, 9, 40):
        world.add(n_prompt, 64 - n_prompt)
    world.run()
    assert world.scheduler.preemptions > 0
    assert len(world.outputs) == 8
    world.check_outputs()
    assert world.pool.available() == 16


def test_waste_is_under_one_block_a_sequence(make_world: Make) -> None:
    world = make_world(n_blocks=64, block_size=4)
    seqs = [world.add(n, 30) for n in (1, 4, 7, 8)]
    for _ in range(25):
        world.step()
        held = world.pool.n_blocks - world.pool.available()
        assert held <= sum(world.pool.blocks_for(len(world.scheduler.tokens(s))) for s in seqs)


@pytest.mark.parametrize("when", ["queued", "mid-prompt", "prefilled", "decoding", "preempted"])
def test_a_cancel_in_any_state_frees_everything_at_once(make_world: Make, when: str) -> None:
    world = make_world(n_blocks=8, block_size=4, max_context=32, max_step_tokens=8)
    other = world.add(7, 20) if when == "preempted" else None
    seq = world.add(12 if when == "mid-prompt" else 7, 20)
    steps = {"queued": 0, "mid-prompt": 1, "prefilled": 1, "decoding": 3, "preempted": 0}[when]
    for _ in range(steps):
        world.step()
    while other is not None and world.scheduler.preemptions == 0:
        world.step()
    world.scheduler.finish(seq)
    world.scheduler.check_integrity()
    assert not world.scheduler.is_live(seq)
    if other is not None:
        world.scheduler.finish(other)
    assert world.pool.available() == 8
    assert not world.scheduler.has_work
    for forgotten in (world.scheduler.finish, world.scheduler.tokens, world.scheduler.state, world.scheduler.times):
        with pytest.raises(InternalError, match=f"no live sequence {seq}"):
            forgotten(seq)


def test_layer_groups_share_the_pool(make_world: Make) -> None:
    world = make_world(n_blocks=16, block_size=4, n_groups=2, max_context=32)
    with pytest.raises(Unschedulable):
        make_world(n_blocks=15, block_size=4, n_groups=2, max_context=32).add(30, 2)
    for _ in range(4):
        world.add(10, 20)
    world.run()
    assert world.scheduler.preemptions > 0
    world.check_outputs()
