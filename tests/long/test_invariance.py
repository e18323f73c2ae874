"""Promise 1 in the long run: hundreds of random workloads, each request with the bits it gets alone.

A round has settings of its own (threads, block size, pool, step size, sequences at once) and requests that arrive,
stream and are aborted at random. The reference is each request alone, in the instruction set of the round.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miro_cy import Engine, SamplingParams
from miro_cy._kernels import select
from miro_cy.requests import Event, Request

#: Rounds for a model in an instruction set; there are 9 models and up to 6 sets.
ROUNDS = 10
MAX_STEPS = 20_000
LONGEST = 380
ALONE = {"threads": 1, "block_size": 32, "step_ms": 60_000, "prefix_cache": False}


@dataclass
class Got:
    """What came of a choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None

    def take(self, event: Event) -> None:
        assert self.reason is None, "an event after the last one"
        self.tokens += event.tokens
        self.logprobs += event.logprobs or []
        self.reason = event.finish_reason


@dataclass
class Asked:
    """A request of a round, and what came of it."""

    tokens: list[int]
    params: SamplingParams
    arrives: int  # step
    aborted: int | None = None  # after so many tokens of its first choice
    got: list[Got] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.got = [Got() for _ in range(self.params.n)]

    @property
    def has_ended(self) -> bool:
        return all(got.reason is not None for got in self.got)


def make_requests(draw: random.Random, vocab: int) -> list[Asked]:
    """Up to 24 requests: prompts of 1 to LONGEST tokens, mostly short, some alike; greedy and sampled."""
    base = [draw.randrange(vocab) for _ in range(LONGEST)]
    asked = []
    for _ in range(draw.randrange(2, 25)):
        length = draw.choice(
            [1, 15, 16, 17, 31, 32, 33, draw.randrange(1, 60), draw.randrange(1, 60), draw.randrange(1, LONGEST)]
        )
        tokens = base[:length] if draw.random() < 0.3 else [draw.randrange(vocab) for _ in range(length)]
        most = draw.choice([1, 2, 33, 64, draw.randrange(1, 120), draw.randrange(60, 120)])
        way: dict[str, Any] = draw.choice(
            [
                {"temperature": 0.0},
                {"temperature": draw.uniform(0.05, 2)},
                {"temperature": 0.9, "top_p": draw.uniform(0.1, 1)},
                {"temperature": 1.1, "top_k": draw.randrange(1, 60)},
                {"top_k": 50, "top_p": 0.9, "stop_token_ids": tuple(draw.sample(range(vocab), 4))},
            ]
        )
        seed, ignore = draw.choice([7, draw.randrange(2**64)]), draw.random() < 0.8
        n = draw.choice([1, 1, 1, 2, 5])
        params = SamplingParams(n=n, max_tokens=most, seed=seed, ignore_eos=ignore, logprobs=draw.randrange(4), **way)
        aborted = draw.randrange(most) if draw.random() < 0.2 else None
        asked.append(Asked(tokens, params, draw.choice([0, 0, draw.randrange(40)]), aborted))
    return asked


def make_settings(draw: random.Random, asked: list[Asked], engine: Engine, kv_dtype: str) -> dict[str, Any]:
    """Settings under which all of it can run, in a pool that is often too small for all at once."""
    block = draw.choice([16, 16, 32, 64])
    needs = [-(-(len(one.tokens) + (one.params.max_tokens or 0)) // block) for one in asked]
    blocks = max(*needs, 6) + draw.choice([0, 1, 2, 4, sum(needs)])
    bytes_per_token = engine._parts.spec.kv_bytes_per_token(kv_dtype)
    return {
        "threads": draw.choice([1, 1, 2, 3]),
        "block_size": block,
        "kv_memory": bytes_per_token * block * blocks,
        "max_step_tokens": draw.choice([1, 3, 7, 33, 100, 512, 512]),
        "max_num_seqs": draw.choice([1, 3, 8, 16, 64]),
        "step_ms": draw.choice([0.01, 5, 60_000]),
        "prefix_cache": draw.random() < 0.8,
        "policy": draw.choice(["fcfs", "priority", "fair"]),
        "admission": draw.choice(["watermark", "watermark", "reserve"]),
        "watermark": draw.choice([0, 0.1]),
    }


def run(engine: Engine, asked: list[Asked]) -> None:
    """Add, step and abort until all have ended; every block is accounted for after every step."""
    live: dict[int, Asked] = {}
    waiting = sorted(asked, key=lambda one: one.arrives)
    for step in range(MAX_STEPS):
        while waiting and (waiting[0].arrives <= step or not engine.has_work):
            one = waiting.pop(0)
            request = Request({"tokens": one.tokens}, one.params, priority=len(live) % 5, client="abc"[len(live) % 3])
            live[engine.add(request)] = one
        if not engine.has_work:
            break
        for event in engine.step():
            live[event.request_id].got[event.choice].take(event)
        engine.check_integrity()
        for request, one in live.items():
            if not one.has_ended and one.aborted is not None and len(one.got[0].tokens) >= one.aborted:
                one.aborted = None
                assert engine.abort(request)
    assert all(one.has_ended for one in asked), "some requests never end"
    stats = engine.stats()
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]


def check(one: Asked, alone: Engine) -> None:
    """Equal bits, or for what was aborted: the same beginning."""
    whole = alone.generate({"tokens": one.tokens}, one.params)
    for got, want in zip(one.got, whole.choices, strict=True):
        n = len(got.tokens)
        assert got.reason in (want.finish_reason, "cancelled")
        assert got.tokens == (want.tokens[:n] if got.reason == "cancelled" else want.tokens)
        assert want.logprobs is not None
        # Floats that are equal are the same bits here: none is NaN, and a log-probability of 0 has one sign.
        assert [(item.logprob, item.top) for item in got.logprobs] == [(i.logprob, i.top) for i in want.logprobs[:n]]


@pytest.fixture(params=select.available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction-set build this machine can run, in use while the test runs."""
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


def test_promise_batch_invariance_over_random_workloads(
    isa: str, golden_models: list[Path], scaled: Callable[[int], int]
) -> None:
    seen: Counter[str] = Counter()
    for path in golden_models:
        for number in range(scaled(ROUNDS)):
            name = f"{path.parent.name}/{path.stem} {number}"  # the same rounds in every instruction set
            draw = random.Random(name)
            compute, kv_dtype = draw.choice([("fast", "fp16"), ("fast", "fp32"), ("fast", "int8"), ("exact", "fp32")])
            if compute == "fast" and isa == select.TILES:
                compute, kv_dtype = "bf16", "bf16" if kv_dtype == "fp16" and number % 2 else kv_dtype
            common = {"compute": compute, "kv_dtype": kv_dtype}
            with Engine.load(path, **ALONE, **common) as alone:
                asked = make_requests(draw, alone.vocab_size)
                settings = make_settings(draw, asked, alone, kv_dtype)
                try:
                    with Engine.load(path, **settings, **common) as engine:
                        run(engine, asked)
                        seen["preemptions"] += engine.stats()["preemptions"]
                    for one in asked:
                        check(one, alone)
                except Exception as error:
                    raise AssertionError(f"round {name!r} in {isa}: {common} {settings}") from error
            seen.update(str(got.reason) for one in asked for got in one.got)
            seen["choices"] += sum(one.params.n > 1 for one in asked)
            seen["rounds"] += 1
    assert seen["rounds"] == len(golden_models) * scaled(ROUNDS)
    assert seen["length"] > seen["rounds"], seen
    assert seen["preemptions"] > seen["rounds"] / 4, seen
    assert seen["cancelled"] > seen["rounds"] / 4, seen
    assert seen["stop"] > 0, seen
    assert seen["choices"] > seen["rounds"], seen
