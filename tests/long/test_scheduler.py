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
        **draw.choice([{"sampled": True}, {"beams": True}, {}]),
    )


def relate(world: Any, draw: random.Random, what: str) -> None:
    """Fork a sequence, hold one back, hand one that waits its token, or have another join its family."""
    able = {"fork": world.can_fork, "hold": world.is_free, "resume": world.can_resume, "join": world.can_join}[what]
    for seq in filter(able, world.live()):
        if draw.random() < 0.3:
            if what == "hold":
                world.on_hold.add(seq)
            elif what == "join":
                n_prompt, max_new = world.size(seq)
                generated = world.scheduler.tokens(seq).tolist()[n_prompt : n_prompt + draw.randrange(max_new - 1)]
                world.join(seq, [*generated, draw.randrange(4)])
            else:
                getattr(world, what)(seq, draw.randrange(4))
            return


def play(seed: str) -> tuple[Any, Counter[str]]:
    """A round from its seed: arrivals, steps, failures and cancels, then whatever is left to its end."""
    draw, seen = random.Random(seed), Counter[str]()
    world = make_world(draw)
    scheduler = world.scheduler
    for _ in range(OPERATIONS):
        live = world.live()
        what = draw.choices(
            ["add", "step", "fail", "cancel", "fork", "hold", "resume", "join"], [6, 12, 1, 1, 2, 1, 2, 1]
        )[0]
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
                if scheduler.is_live(seq):
                    world.cancel(seq)
        elif what != "cancel":
            relate(world, draw, what)
        elif live:
            world.cancel(draw.choice(live))
            seen["cancelled"] += 1
        scheduler.check_integrity()
    seen["steps left"] = world.run(max_steps=world.most_steps() + 2)
    seen["forked"] = sum(len(family) - 1 for family in world.families.values()) - world.joined
    seen["forked without room"] = world.queued - world.joined
    seen["joined"], seen["resumed"], seen["given up"] = world.joined, world.resumed, world.searches.given_up
    seen["searched"] = len(world.searches.found)
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
            assert again.searches.found == world.searches.found
        seen += counts
        seen["ended"] += len(world.outputs)
    print(dict(seen), file=sys.stderr)
    related = ("forked", "forked without room", "joined", "resumed", "given up", "searched")
    wanted = ("ended", "cancelled", "refused", "preempted", "evicted", "cached", *related)
    assert min(seen[what] for what in wanted) > 0
