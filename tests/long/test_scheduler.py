"""Promise 3 in the long run: the scheduler without a model, over a hundred thousand operations; every request ends.

Larger than what tests/sched draws: pools of hundreds of blocks, dozens of sequences, prompts of many families, under
every policy; a replay from the same seed must compute the same rows.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy.errors import QueueFull

World = runpy.run_path(str(Path(__file__).parents[1] / "sched" / "conftest.py"))["World"]
ROUNDS = 40
OPERATIONS = 800


def make_world(draw: random.Random) -> Any:
    return World(
        n_blocks=draw.choice([12, 40, 200]),
        block_size=draw.choice([1, 4, 16]),
        windows=draw.choice([(0,), (0,), (0, 0), (9,), (0, 30, 30), (40, 5)]),
        max_context=128,
        max_num_seqs=draw.choice([1, 4, 24]),
        max_step_tokens=draw.choice([1, 8, 64, 512]),
        max_waiting=draw.choice([4, 40]),
        max_score_tokens=draw.choice([1, 8, 64]),
        hash_bits=draw.choice([64, 64, 3]),
        prefix=draw.random() < 0.9,
        policy=draw.choice(["fcfs", "priority", "fair"]),
        admission=draw.choice(["watermark", "watermark", "reserve"]),
        watermark=draw.choice([0.0, 0.01, 0.2]),
    )


def add(world: Any, draw: random.Random) -> None:
    room = min(world.scheduler.limits.capacity, 128)
    n_prompt = draw.randrange(1, max(2, draw.choice([room // 8, room])))
    max_new = draw.randrange(0, max(1, min(30, room - n_prompt)))
    score = draw.random() < 0.1
    world.add(
        n_prompt,
        max_new,
        logits_from=draw.randrange(n_prompt) if score else -1,
        shared=int(n_prompt * draw.choice([0, 0.5, 0.9, 1.0])),
        like=draw.randrange(4),
        salt=draw.choice([b"", b"", b"one"]),
        priority=draw.randrange(-3, 4),
        client=draw.choice("abcde"),
        choices=draw.choice([1, 1, 1, 2, 8]),
        sampled=draw.random() < 0.7,
    )


def play(seed: str) -> tuple[Any, Counter[str]]:
    """A round from its seed: arrivals, steps, failures and cancels, then whatever is left to its end."""
    draw, seen = random.Random(seed), Counter[str]()
    world = make_world(draw)
    scheduler = world.scheduler
    for _ in range(OPERATIONS):
        live = [seq for seq in world.prompts if scheduler.is_live(seq)]
        what = draw.choices(["add", "step", "fail", "cancel", "fork"], [6, 12, 1, 1, 2])[0]
        if what == "add":
            try:
                add(world, draw)
            except QueueFull:
                seen["refused"] += 1
        elif what == "step":
            world.step()
        elif what == "fail":
            failed = world.fail_step(early=draw.random() < 0.5)
            for seq in failed if draw.random() < 0.3 else []:
                scheduler.finish(seq)
        elif what == "fork":
            if able := [seq for seq in live if world.can_fork(seq)]:
                world.fork(draw.choice(able), draw.randrange(4))
        elif live:
            scheduler.finish(draw.choice(live))
            seen["cancelled"] += 1
        scheduler.check_integrity()
    to_come = {seq: world.sizes[seq] if seq in world.to_fork else 1 for seq in world.live()}
    bound = sum(sum(world.size(seq)) * n for seq, n in to_come.items())
    seen["steps left"] = world.run(max_steps=bound + 1)
    seen["forked"] = len(world.given)
    seen["forked without room"] = world.queued
    seen["preempted"] = scheduler.preemptions
    seen["evicted"] = world.pool.evictions
    seen["cached"] = sum(world.cached.values())
    world.check_outputs()
    world.check_index()
    assert world.pool.available() == world.pool.n_blocks
    return world, seen


@pytest.mark.parametrize("part", range(4))
def test_promise_3_conservation_over_random_rounds(part: int, scaled: Callable[[int], int]) -> None:
    seen: Counter[str] = Counter()
    for number in range(scaled(ROUNDS)):
        world, counts = play(f"{part} {number}")
        if number % 8 == 0:
            again, _ = play(f"{part} {number}")
            assert (again.log, again.outputs, again.cached) == (world.log, world.outputs, world.cached)
        seen += counts
        seen["ended"] += len(world.outputs)
    print(dict(seen), file=sys.stderr)
    wanted = ("ended", "cancelled", "refused", "preempted", "evicted", "cached", "forked", "forked without room")
    assert min(seen[what] for what in wanted) > 0
