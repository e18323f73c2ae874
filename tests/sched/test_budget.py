"""The step budget meets its time target whatever a token and a key cost, and never stops a prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy.sched.budget import FIRST_CHUNK, IDLE_FACTOR, MIN_CHUNK, StepBudget, keys_of
from miro_cy.sched.config import SchedulerConfig

TARGET = 0.050
#: Seconds of a step of (decode rows, their keys, prompt tokens, their keys).
Cost = Callable[[int, int, int, int], float]


class Run:
    """A scheduler's use of the budget: streams of a given depth, and a prompt that is computed chunk by chunk."""

    def __init__(self, cost: Cost, *, noise: float = 0.0, **config: int) -> None:
        self.budget = StepBudget(SchedulerConfig(**{"max_step_tokens": 4096, "step_ms": 50.0, **config}))
        self.cost = cost
        self.noise = noise
        self.rng = np.random.default_rng(1)
        self.position = 0

    def step(self, n_decode: int, depth: int = 100, *, prompt: bool = True, stalled: float = 0.0) -> tuple[int, float]:
        """(prompt tokens, seconds) of one step."""
        keys, n = n_decode * depth, 0
        self.budget.begin(n_decode, keys)
        if prompt and not self.budget.spent:
            n = self.budget.fit(self.position, 10**9)
            self.budget.take(self.position, n)
        prompt_keys = keys_of(self.position, n)
        seconds = self.cost(n_decode, keys, n, prompt_keys) * (1.0 + self.noise * self.rng.uniform(-1, 1)) + stalled
        self.budget.observe(n_decode, keys, n, prompt_keys, seconds)
        self.position += n
        return n, seconds

    def decode(self, n_decode: int, steps: int = 10) -> None:
        for _ in range(steps):
            self.step(n_decode, prompt=False)

    def steps(self, count: int, n_decode: int, **more: int) -> list[tuple[int, float]]:
        return [self.step(n_decode, **more) for _ in range(count)]


def affine(fixed: float, row: float, token: float, key: float) -> Cost:
    """Everything adds up."""
    return lambda rows, row_keys, tokens, keys: fixed + row * rows + token * tokens + key * (row_keys + keys)


def roofline(weights: float, token: float, key: float) -> Cost:
    """A pass over the weights, or the arithmetic of all rows, whichever takes longer; and attention."""
    return lambda rows, row_keys, tokens, keys: max(weights, token * (rows + tokens)) + key * (row_keys + keys)


costs = st.one_of(
    st.builds(affine, st.floats(0.001, 0.02), st.floats(0, 5e-4), st.floats(5e-5, 1.5e-3), st.floats(0, 1e-6)),
    st.builds(roofline, st.floats(0.001, 0.02), st.floats(5e-5, 1.5e-3), st.floats(0, 1e-6)),
)


def test_the_first_chunk_is_small() -> None:
    for n_decode, config, want in ((0, {}, FIRST_CHUNK), (0, {"max_step_tokens": 7}, 7), (10, {}, FIRST_CHUNK)):
        assert Run(affine(0.01, 0, 0.001, 0), **config).step(n_decode)[0] == want
    assert Run(affine(0.01, 0, 0.001, 0), max_step_tokens=40).step(10)[0] == 30


@given(cost=costs, n_decode=st.integers(1, 32), seen_alone=st.booleans())
@settings(max_examples=200)
def test_a_step_with_streams_meets_its_target(cost: Cost, n_decode: int, seen_alone: bool) -> None:
    run = Run(cost)
    if seen_alone:
        run.decode(n_decode)
    run.steps(15, n_decode)
    while run.position < 20_000:
        at = run.position
        n, seconds = run.step(n_decode)
        assert n >= MIN_CHUNK
        least = cost(n_decode, 100 * n_decode, MIN_CHUNK, keys_of(at, MIN_CHUNK))
        assert seconds <= max(1.2 * TARGET, 1.05 * least), "not much over the target, unless the least chunk is"
        most = cost(n_decode, 100 * n_decode, 4096 - n_decode, keys_of(at, 4096 - n_decode))
        assert seconds >= min(0.75 * TARGET, 0.95 * most, 0.95 * least), "nor far below, unless it takes all there is"


@given(cost=costs)
@settings(max_examples=100)
def test_a_new_prompt_begins_near_the_target_after_a_deep_one(cost: Cost) -> None:
    """From a context of 20,000 tokens to one of none and back: the cost of a key is told from that of a token."""
    run = Run(cost, max_step_tokens=512)
    run.decode(4)
    for begin in (0, 20_000, 0):
        run.position = begin
        run.steps(60, 4)
    run.position = 19_000
    least = cost(4, 400, MIN_CHUNK, keys_of(19_000, MIN_CHUNK))
    _, seconds = run.step(4)
    assert seconds <= max(1.6 * TARGET, 1.05 * least)


@given(cost=costs, n_decode=st.integers(1, 16))
@settings(max_examples=60)
def test_noise_of_a_fifth_costs_little(cost: Cost, n_decode: int) -> None:
    run = Run(cost, noise=0.2)
    run.decode(n_decode)
    run.steps(20, n_decode)
    seconds = [s for _, s in run.steps(60, n_decode)]
    least = cost(n_decode, 100 * n_decode, MIN_CHUNK, keys_of(run.position, MIN_CHUNK))
    assert np.median(seconds) <= max(1.15 * TARGET, 1.25 * least)
    assert max(seconds) <= max(1.7 * TARGET, 1.25 * least)


def test_a_thousand_decode_steps_make_nobody_forget_what_a_prompt_costs() -> None:
    run = Run(affine(0.010, 0.0002, 0.001, 0))
    run.steps(20, 4)
    run.decode(4, steps=1000)
    seconds = [s for _, s in run.steps(25, 4)]
    assert max(seconds) <= 1.1 * TARGET
    assert min(seconds) >= 0.7 * TARGET, "the first steps beside streams knew nothing of the cost of a row"
    assert seconds[-1] == pytest.approx(TARGET, rel=0.1)


def test_steps_that_all_take_the_target_do_not_look_free() -> None:
    """Under a load of prompts without end no step only decodes; all take step_ms. The chunk must stay as it is."""
    run = Run(affine(0.020, 0.0005, 0.0005, 0), noise=0.05)
    chunks = [n for n, _ in run.steps(1000, 8)][50:]
    assert max(chunks) <= 1.3 * min(chunks)


def test_without_streams_a_step_may_take_longer() -> None:
    run = Run(affine(0.010, 0.0002, 0.001, 0))
    assert run.steps(30, 0)[-1][1] == pytest.approx(TARGET * IDLE_FACTOR, rel=0.1)
    assert run.step(3)[1] <= 1.3 * TARGET, "and the first step beside a stream is short again"


def test_a_chunk_grows_at_most_twofold() -> None:
    run = Run(affine(0.0, 0.0, 1e-9, 0))
    chunks = [n for n, _ in run.steps(10, 1)]
    assert chunks[0] == FIRST_CHUNK
    assert chunks[-1] == 4095
    assert all(after <= 2 * before for before, after in pairwise(chunks))
    run = Run(affine(0.001, 0.0, 1e-5, 1e-6))
    run.steps(1, 1)
    run.position = 100_000  # a prefix hit, deeper than anything seen
    n, seconds = run.step(1)
    assert (n, seconds < 2.0) == (MIN_CHUNK, True), "what so many keys cost is a guess yet"


@pytest.mark.parametrize("stalled", [0.2, 60.0])
def test_a_suspended_process_is_soon_forgotten(stalled: float) -> None:
    run = Run(affine(0.010, 0.0002, 0.0005, 0))
    run.decode(4)
    before = run.steps(30, 4)[-1][0]
    run.step(4, stalled=stalled)
    chunks = [n for n, _ in run.steps(12, 4)]
    assert min(chunks) >= before / 3
    assert chunks[-1] == pytest.approx(before, rel=0.2)


def test_a_machine_that_turns_slow_is_followed() -> None:
    run = Run(affine(0.004, 0.0002, 0.0002, 0))
    run.decode(4)
    run.steps(30, 4)
    run.cost = affine(0.012, 0.0006, 0.0006, 0)
    seconds = [s for _, s in run.steps(30, 4)]
    assert max(seconds[8:]) <= 1.2 * TARGET
    run.cost = affine(0.004, 0.0002, 0.0002, 0)
    assert run.steps(60, 4)[-1][1] >= 0.8 * TARGET


@given(
    n_decode=st.integers(0, 10_000),
    first=st.integers(0, 100_000),
    seen=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 600), st.floats(0.0, 1e6)), max_size=8),
    max_step_tokens=st.integers(1, 600),
    wanted=st.lists(st.integers(1, 700), min_size=1, max_size=5),
)
def test_a_prompt_always_progresses_and_the_limit_holds(
    n_decode: int, first: int, seen: list[tuple[int, int, float]], max_step_tokens: int, wanted: list[int]
) -> None:
    budget = StepBudget(SchedulerConfig(max_step_tokens=max_step_tokens))
    for rows, tokens, seconds in seen:
        budget.observe(rows, rows * 50, tokens, keys_of(10, tokens), seconds)
    budget.begin(n_decode, n_decode * 10)
    total = 0
    for want in wanted:
        if budget.spent:
            break
        n = budget.fit(first, want)
        assert 0 <= n <= want
        budget.take(first, n)
        total += n
    assert total >= min(MIN_CHUNK, max_step_tokens, sum(wanted))
    assert total + n_decode <= max(max_step_tokens, n_decode + budget.min_tokens)


def test_a_few_prompt_tokens_say_nothing_about_the_cost_of_many() -> None:
    budget = StepBudget(SchedulerConfig())
    budget.observe(0, 0, 1, 1, 0.040)
    budget.begin(0, 0)
    assert budget.fit(0, 1000) == FIRST_CHUNK


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-9])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot take"):
        StepBudget(SchedulerConfig()).observe(0, 0, 32, 528, seconds)
