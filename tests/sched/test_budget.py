"""The step budget meets its time target at any cost a token, and never stops a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.sched.budget import FIRST_CHUNK, IDLE_FACTOR, MIN_CHUNK, StepBudget
from miro_cy.sched.config import SchedulerConfig


def settle(budget: StepBudget, n_decode: int, fixed: float, a_token: float, steps: int = 40) -> tuple[int, float]:
    """Run steps of fixed + a_token * prompt tokens seconds; the last one's prompt tokens and time."""
    n, seconds = 0, 0.0
    for _ in range(steps):
        n = budget.prompt_tokens(n_decode)
        seconds = fixed + a_token * n
        budget.observe(n_decode, n, seconds)
    return n, seconds


def test_the_first_chunk_is_small() -> None:
    assert StepBudget(SchedulerConfig()).prompt_tokens(0) == FIRST_CHUNK
    assert StepBudget(SchedulerConfig(max_step_tokens=7)).prompt_tokens(0) == 7
    assert StepBudget(SchedulerConfig(max_step_tokens=40)).prompt_tokens(10) == 30


@given(
    fixed=st.floats(0.0, 0.03),
    a_token=st.floats(1e-5, 2e-3),
    seen_alone=st.booleans(),
    n_decode=st.integers(1, 64),
)
def test_a_step_with_streams_meets_its_target(fixed: float, a_token: float, seen_alone: bool, n_decode: int) -> None:
    config = SchedulerConfig(max_step_tokens=4096, step_ms=50.0)
    budget = StepBudget(config)
    if seen_alone:
        budget.observe(n_decode, 0, fixed)
    n, seconds = settle(budget, n_decode, fixed, a_token)
    ideal = (0.050 - fixed) / a_token
    expected = max(MIN_CHUNK, min(ideal, 4096 - n_decode))
    assert 0.8 * expected - 2 <= n <= 1.05 * expected + 2
    assert seconds <= max(0.055, fixed + a_token * (MIN_CHUNK + 1))


def test_the_first_chunk_beside_streams_leaves_room_for_their_rows() -> None:
    budget = StepBudget(SchedulerConfig(max_step_tokens=4096, step_ms=50.0))
    settle(budget, 0, 0.0, 0.001)
    assert budget.prompt_tokens(4) == pytest.approx(50, abs=1)
    for _ in range(20):
        budget.observe(4, 0, 0.030)
    assert budget.prompt_tokens(4) == pytest.approx(20, abs=1)


def test_without_streams_a_step_may_take_longer() -> None:
    config = SchedulerConfig(max_step_tokens=4096, step_ms=50.0)
    n, seconds = settle(StepBudget(config), 0, 0.0, 0.001)
    assert n == pytest.approx(50 * IDLE_FACTOR, abs=1)
    assert seconds == pytest.approx(0.050 * IDLE_FACTOR, rel=0.02)


@given(
    n_decode=st.integers(0, 10_000),
    seen=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 600), st.floats(0.0, 1e6)), max_size=8),
    max_step_tokens=st.integers(1, 600),
)
def test_a_prompt_always_progresses_and_the_limit_holds(
    n_decode: int, seen: list[tuple[int, int, float]], max_step_tokens: int
) -> None:
    budget = StepBudget(SchedulerConfig(max_step_tokens=max_step_tokens))
    for step in seen:
        budget.observe(*step)
    n = budget.prompt_tokens(n_decode)
    assert n >= min(MIN_CHUNK, max_step_tokens)
    assert n + n_decode <= max(max_step_tokens, n_decode + budget.min_tokens)


def test_a_few_prompt_tokens_say_nothing_about_the_cost_of_many() -> None:
    budget = StepBudget(SchedulerConfig())
    budget.observe(0, 1, 0.040)
    assert budget.prompt_tokens(0) == FIRST_CHUNK


def test_one_slow_step_is_forgotten() -> None:
    budget = StepBudget(SchedulerConfig(max_step_tokens=4096))
    before, _ = settle(budget, 1, 0.0, 0.0005)
    budget.observe(1, before, 5.0)
    assert budget.prompt_tokens(1) == MIN_CHUNK
    after, _ = settle(budget, 1, 0.0, 0.0005)
    assert after == pytest.approx(before, abs=1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-9])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot take"):
        StepBudget(SchedulerConfig()).observe(0, 32, seconds)
