"""Layer groups with a window: what they hold, give back, find of others, and that nobody starves for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miro_cy.errors import Unschedulable

Make = Callable[..., Any]


def slots(world: Any) -> list[int]:
    """Table slots in use."""
    return [slot for slot in range(world.tables.n_slots) if world.tables.length(slot) > 0]


@pytest.mark.parametrize("windows", [(10,), (0, 10), (0, 7, 22), (1,), (64,)])
@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_what_a_sequence_holds_is_bounded_by_its_windows(
    make_world: Make, windows: tuple[int, ...], step_tokens: int
) -> None:
    world = make_world(n_blocks=120, block_size=4, max_context=128, windows=windows, max_step_tokens=step_tokens)
    seq = world.add(80, 40)
    most, held, seen = world.most(119), [0] * len(windows), 0
    while seq not in world.outputs:
        world.step()
        world.scheduler.check_integrity()
        for slot in slots(world):
            now = world.held(slot)
            assert all(n <= limit for n, limit in zip(now, most, strict=True))
            held = [max(pair) for pair in zip(held, now, strict=True)]
            seen += 1
    assert seen >= 40
    assert step_tokens > 1 or held == most, "and the bound is reached"
    world.check_outputs()
    assert world.pool.available() == 120


def test_a_sequence_longer_than_the_pool_runs_when_all_layers_have_a_window(make_world: Make) -> None:
    world = make_world(n_blocks=5, block_size=4, max_context=512, windows=(6, 3))
    long, longer = world.add(300, 60), world.add(400, 50)
    world.run()
    assert [len(world.outputs[seq]) for seq in (long, longer)] == [360, 450]
    world.check_outputs()


def test_what_never_fits_is_refused(make_world: Make) -> None:
    world = make_world(n_blocks=5, block_size=4, max_context=512, windows=(0, 6))
    with pytest.raises(Unschedulable, match="whole pool holds 8"):
        world.add(9, 1)
    world.add(8, 1)
    with pytest.raises(Unschedulable, match="whole pool holds 8"):
        make_world(n_blocks=5, block_size=4, max_context=512, windows=(6, 6)).add(300, 60)
    make_world(n_blocks=6, block_size=4, max_context=512, windows=(6, 6)).add(300, 60)


def test_more_sequences_fit_than_without_a_window(make_world: Make) -> None:
    most = []
    for windows in ((0, 0), (0, 8)):
        world = make_world(n_blocks=60, block_size=4, max_context=128, windows=windows, prefix=False)
        for _ in range(6):
            world.add(60, 20)
        peak = 0
        while world.step() is not None:
            peak = max(peak, world.scheduler.n_running)
        most.append(peak)
        world.check_outputs()
    assert most == [1, 3] or most[0] < most[1]


@pytest.mark.parametrize("admission", ["watermark", "reserve"])
def test_many_in_a_pool_for_one_all_end(make_world: Make, admission: str) -> None:
    world = make_world(
        n_blocks=26, block_size=4, windows=(0, 9), max_context=80, max_step_tokens=16, admission=admission
    )
    for i, n_prompt in enumerate((1, 17, 30, 3, 62, 20, 9, 40)):
        world.add(n_prompt, 79 - n_prompt, shared=n_prompt // 2, like=i % 2)
    world.run()
    assert len(world.outputs) == 8
    assert (world.scheduler.preemptions > 0) == (admission == "watermark")
    world.check_outputs()


def test_the_oldest_prompt_advances_whatever_the_others_hold(make_world: Make) -> None:
    """Two prompts that find a window's blocks together, and go on alone: each needs blocks that the other holds."""
    world = make_world(n_blocks=6, block_size=4, windows=(9,), max_context=200, max_step_tokens=5)
    seqs = [world.add(100, 20, shared=60), world.add(100, 20, shared=60), world.add(30, 90)]
    while world.scheduler.has_work:
        oldest = min(seq for seq in seqs if world.scheduler.is_live(seq))
        assert oldest in world.step()
        world.scheduler.check_integrity()
    world.check_outputs()


def firsts(world: Any, seq: int) -> list[int]:
    return [row[1] for log in world.log for row in log if row[0] == seq]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("windows", [(0, 10), (10,), (0, 10, 3), (30, 10)])
def test_a_prefix_is_found_though_its_beginning_was_given_back(
    make_world: Make, windows: tuple[int, ...], live: bool
) -> None:
    world = make_world(n_blocks=200, block_size=4, windows=windows)
    first = world.add(60, 50 if live else 1, shared=60)
    for _ in range(4):
        world.step()
    assert world.scheduler.is_live(first) == live
    seq = world.add(60, 4, shared=57)
    world.step()
    assert firsts(world, seq) == [56]
    for slot in slots(world):
        assert all(n <= most for n, most in zip(world.held(slot), world.most(110), strict=True))
    world.run()
    assert world.cached[seq] == 56
    world.check_outputs()
    world.check_index()


def test_a_hit_ends_where_every_window_is_whole(make_world: Make) -> None:
    """The blocks of the window's group are gone, those of the other are not: only what needs none of them is found."""
    world = make_world(n_blocks=34, block_size=4, windows=(0, 12), max_context=100)
    world.add(57, 1, shared=57)  # 14 full blocks a group, the window's end among the last to go
    world.run()
    before = world.index.n_entries
    world.add(60, 1, like=1, shared=60)
    world.run()
    assert world.pool.evictions > 0
    assert before == 28
    for n_prompt in (57, 40, 20):
        seq = world.add(n_prompt, 1, shared=n_prompt)
        world.run()
        assert world.cached[seq] % 4 == 0
    world.check_outputs()
    world.check_index()


def test_what_hangs_on_an_evicted_block_is_found_no_more(make_world: Make) -> None:
    """All layers have a window: the beginning of a prompt is given back first, and taken first. Its end, in use, stays
    what it is, but the index forgets it."""
    world = make_world(n_blocks=20, block_size=4, windows=(8,), max_context=200)
    old = world.add(60, 100, shared=60)
    while world.scheduler.num_computed(old) < 60:
        world.step()
    assert (world.index.n_entries, world.pool.n_cached) == (15, 13)
    other = world.add(50, 30, like=1, shared=50)
    while other not in world.outputs:
        world.step()
        world.scheduler.check_integrity()
        world.check_index()
    assert world.pool.evictions > 0
    assert world.scheduler.is_live(old)
    seq = world.add(60, 1, shared=60)
    world.run()
    assert world.cached[seq] == 0
    world.check_outputs()
    assert world.pool.available() == 20


def test_a_step_that_comes_to_nothing_gives_its_chunk_back(make_world: Make) -> None:
    world = make_world(n_blocks=40, block_size=4, windows=(6,), max_context=200, max_step_tokens=64)
    seq = world.add(100, 4)
    for _ in range(3):
        assert world.fail_step() == [seq]
        assert world.pool.n_blocks - world.pool.available() == 8, "a chunk of 32 tokens"
    world.scheduler.finish(seq)
    world.add(100, 4)
    world.add(10, 30)
    world.step()
    assert max(map(sum, map(world.held, slots(world)))) <= 3
    world.run()
    world.check_outputs()


def test_the_beginning_of_a_prompt_outlasts_its_end(make_world: Make) -> None:
    """All layers have a window, so that the beginning was used least recently; the end is evicted all the same."""
    world = make_world(n_blocks=20, block_size=4, windows=(8,), max_context=200)
    world.add(61, 1, shared=61)
    world.run()
    assert world.pool.n_cached == 15
    world.add(41, 1, like=1, shared=41)  # eleven blocks, of which five are free
    world.run()
    assert world.pool.evictions == 6
    seq = world.add(61, 1, shared=61)
    world.run()
    assert world.cached[seq] == 36
    world.check_outputs()
    world.check_index()
