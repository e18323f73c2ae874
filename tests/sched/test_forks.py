"""Forks in the scheduler: whom they run beside, who waits, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miro_cy.errors import BadField, InternalError, QueueFull

Make = Callable[..., Any]


def decoding(world: Any, **more: Any) -> int:
    """A sequence of ten prompt tokens that may become four, once it decodes."""
    seq: int = world.add(10, 12, choices=4, **more)
    while world.scheduler.state(seq) != "decoding":
        world.step()
    return seq


@pytest.mark.parametrize("prefix", [True, False])
def test_forks_go_on_from_shared_blocks(make_world: Make, prefix: bool) -> None:
    world = make_world(prefix=prefix)
    seq = decoding(world)
    before = world.pool.available()
    forks = [world.fork(seq, token) for token in (1, 2, 3)]
    assert world.pool.available() == before, "nothing is copied before it is written"
    assert world.step() == [seq, *forks]
    assert world.pool.n_blocks - world.pool.available() == 2 + 4, "two full blocks for all, and one for each"
    world.run()
    assert {*world.outputs} == {seq, *forks}
    world.check_outputs()


def test_a_fork_of_a_fork_whose_parent_has_ended(make_world: Make) -> None:
    world = make_world()
    seq = decoding(world)
    first = world.fork(seq, 1)
    world.scheduler.finish(seq)
    world.step()
    second = world.fork(first, 2)
    third = world.fork(second, 3)
    world.scheduler.finish(second)
    assert world.step() == [first, third]
    world.run()
    world.check_outputs()


def test_a_sequence_that_got_no_token_is_forked_into_two(make_world: Make) -> None:
    """As beams do: the hypothesis ends, two others go on from it."""
    world = make_world()
    seq = decoding(world)
    for _ in range(5):
        world.plan()
        sampled = world.forward()
        sampled[0] = -1
        world.commit(sampled, 0.01)
        forks = [world.fork(seq, token) for token in (7, 8)]
        world.scheduler.finish(seq)
        world.scheduler.finish(forks[0])
        world.scheduler.check_integrity()
        seq = forks[1]
    world.run()
    world.check_outputs()
    assert world.outputs[seq][11:16] == [8, 8, 8, 8, 8]


def test_a_fork_only_after_a_commit(make_world: Make) -> None:
    world = make_world()
    seq = decoding(world)
    world.plan()
    with pytest.raises(ValueError, match="before the step is committed"):
        world.scheduler.fork(seq, 1)
    world.commit(world.forward(), 0.01)
    world.fork(seq, 1)
    with pytest.raises(InternalError, match="no live sequence"):
        world.scheduler.fork(99, 1)


def test_no_more_forks_than_were_announced(make_world: Make) -> None:
    world = make_world()
    seq = decoding(world)
    forks = [world.fork(seq, token) for token in (1, 2, 3)]
    with pytest.raises(InternalError, match="all its 4 sequences"):
        world.scheduler.fork(seq, 4)
    world.scheduler.finish(forks[0])
    world.fork(seq, 4)
    world.scheduler.settle(seq)
    world.scheduler.finish(forks[1])
    with pytest.raises(InternalError, match="all its 3 sequences"):
        world.scheduler.fork(seq, 5)
    for choices in (0, 65):
        with pytest.raises(BadField, match="choices must be an integer between 1 and 64"):
            world.add(3, 3, choices=choices)


def test_a_refused_fork_takes_nothing(make_world: Make) -> None:
    world = make_world()
    seq = world.add(50, 5, choices=2)
    world.step()
    assert world.scheduler.state(seq) == "prefilling"
    for _ in range(3):
        with pytest.raises(InternalError, match="does not decode"):
            world.scheduler.fork(seq, 1)
    while world.scheduler.state(seq) != "decoding":
        world.step()
    world.fork(seq, 1)
    world.run()


def test_forks_without_a_slot_wait_in_order_and_nobody_overtakes_them(make_world: Make) -> None:
    world = make_world(max_num_seqs=2)
    seq = decoding(world)
    forks = [world.fork(seq, token) for token in (1, 2, 3)]
    other = world.add(3, 2)
    assert [world.scheduler.state(s) for s in (seq, *forks)] == ["decoding", "decoding", "queued", "queued"]
    assert world.step() == [seq, forks[0]]
    world.run()
    assert list(world.outputs)[:2] == [seq, forks[0]]
    assert world.outputs.keys() == {seq, *forks, other}
    assert [world.cached[s] for s in forks[1:]] == [0, 0], "the request computed its prompt itself"
    world.check_outputs()


def test_forks_come_before_whoever_was_admitted_after_their_family(make_world: Make) -> None:
    world = make_world(n_blocks=16, max_num_seqs=8)
    seq, young = world.add(10, 20, choices=4), world.add(5, 20)
    while world.scheduler.state(seq) != "decoding":
        world.step()
    forks = [world.fork(seq, token) for token in (1, 2, 3)]
    assert world.step() == [seq, *forks, young]
    while not world.scheduler.preemptions:
        world.step()
    assert world.scheduler.state(young) == "queued", "the newest gives way"
    world.run()
    assert list(world.outputs)[-1] == young
    world.check_outputs()


def test_places_are_kept_for_forks_to_come(make_world: Make) -> None:
    world = make_world(max_num_seqs=4)
    seq = world.add(50, 5, choices=4)
    other = world.add(3, 2)
    while world.scheduler.state(seq) != "decoding":
        assert world.step() == [seq]
    world.settle(seq)
    assert world.step() == [seq, other]
    world.run()


@pytest.mark.parametrize(("choices", "admitted"), [(3, False), (2, True)])
def test_reserved_blocks_are_those_of_the_whole_family(make_world: Make, choices: int, admitted: bool) -> None:
    """Ten prompt tokens and twelve more take six blocks, a fork shares two of them."""
    world = make_world(n_blocks=16, admission="reserve", max_num_seqs=8)
    seq, other = world.add(10, 12, choices=choices), world.add(10, 8)  # which takes 5 blocks
    world.step()
    assert (world.scheduler.state(other) != "queued") == admitted
    while world.scheduler.state(seq) != "decoding":
        world.step()
    for token in range(choices - 1):
        assert world.scheduler.state(world.fork(seq, token)) == "decoding"
    world.run()
    assert world.scheduler.preemptions == 0
    world.check_outputs()


@pytest.mark.parametrize("admission", ["watermark", "reserve"])
def test_a_family_larger_than_the_pool_is_admitted_alone(make_world: Make, admission: str) -> None:
    world = make_world(n_blocks=6, admission=admission, max_num_seqs=8)
    seq = decoding(world)
    other = world.add(3, 2)
    forks = [world.fork(seq, token) for token in (1, 2, 3)]
    world.run()
    assert world.outputs.keys() == {seq, *forks, other}
    world.check_outputs()
    assert (world.scheduler.preemptions == 0) == (admission == "reserve")


def test_a_family_counts_for_all_its_sequences_in_the_queue(make_world: Make) -> None:
    world = make_world(max_waiting=4)
    assert world.scheduler.has_room(64)
    world.add(3, 3, choices=3)
    assert (world.scheduler.has_room(), world.scheduler.has_room(2)) == (True, False)
    with pytest.raises(QueueFull, match="3 sequences wait already"):
        world.add(3, 3, choices=2)
    world.add(3, 3)
    assert not world.scheduler.has_room()
    world.step()
    assert world.scheduler.has_room(64)
    world.run()


def test_one_client_is_charged_for_all_its_forks(make_world: Make) -> None:
    world = make_world(policy="fair", max_num_seqs=4)
    seq = decoding(world, client="a")
    for token in (1, 2, 3):
        world.fork(seq, token)
    world.scheduler.finish(seq)
    for client in ("a", "b"):
        world.add(3, 2, client=client)
    world.run()
    order = [s for s in world.outputs if len(world.prompts[s][0]) == 3]
    assert order == sorted(order, reverse=True), "b was served less"


@pytest.mark.parametrize("early", [True, False])
def test_a_copy_that_a_failed_step_did_not_make_is_made_by_the_next(make_world: Make, early: bool) -> None:
    world = make_world()
    seq = decoding(world)
    fork = world.fork(seq, 1)
    assert world.fail_step(early=early) == [seq, fork]
    assert world.scheduler.view.n_copies == early
    world.scheduler.finish(fork)  # whose block is the one to copy from
    world.add(6, 4)
    world.run()
    world.check_outputs()
