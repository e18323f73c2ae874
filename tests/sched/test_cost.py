"""The cost model finds what a step costs, believes no single outlier, and follows what changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_cy.sched.cost import FORGET, RIDGE, LinearCost


def fitted(
    theta: tuple[float, float], seed: int = 0, n: int = 60, noise: float = 0.0
) -> tuple[LinearCost, np.random.Generator]:
    rng = np.random.default_rng(seed)
    cost = LinearCost((1.0, 10.0))
    for _ in range(n):
        x = (1.0, float(rng.integers(0, 60)))
        cost.observe(x, (theta[0] * x[0] + theta[1] * x[1]) * (1.0 + noise * rng.standard_normal()))
    return cost, rng


def test_nothing_is_expected_before_anything_was_seen() -> None:
    assert LinearCost((1.0, 8.0)).predict((1.0, 5.0)) == 0.0


@given(st.floats(0.0, 0.05), st.floats(0.0, 0.01), st.integers(0, 99))
def test_the_coefficients_are_found(fixed: float, each: float, seed: int) -> None:
    cost, _ = fitted((fixed, each), seed)
    for n in (0.0, 3.0, 59.0):
        want = fixed + each * n
        assert cost.predict((1.0, n)) == pytest.approx(want, rel=0.05, abs=1e-3)


@given(st.floats(0.002, 0.05), st.floats(1e-4, 0.01), st.integers(0, 99))
def test_noise_of_a_tenth_moves_a_prediction_by_less(fixed: float, each: float, seed: int) -> None:
    cost, _ = fitted((fixed, each), seed, n=200, noise=0.1)
    assert cost.predict((1.0, 30.0)) == pytest.approx(fixed + 30 * each, rel=0.15)


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(0, 10**6), st.floats(0, 1e6, allow_subnormal=False)), max_size=40
    )
)
def test_whatever_is_measured_no_coefficient_is_negative_or_infinite(seen: list[tuple[int, int, float]]) -> None:
    cost = LinearCost((1.0, 8.0, 4000.0))
    for rows, keys, seconds in seen:
        cost.observe((1.0, rows, keys), seconds)
        assert all(0.0 <= t < float("inf") for t in cost.coefficients())


def cost_of(theta: Sequence[float], seen: list[tuple[tuple[float, ...], float]]) -> float:
    """What the fit makes least, weighted squares and the ridge, where nothing was predicted before."""
    weight, total, held = 1.0, 0.0, [0.0] * len(theta)
    for x, seconds in reversed(seen):
        total += weight * (seconds - sum(t * q for t, q in zip(theta, x, strict=True))) ** 2
        held = [h + weight * q * q for h, q in zip(held, x, strict=True)]
        weight *= FORGET
    return total + RIDGE * sum(h * t * t for h, t in zip(held, theta, strict=True))


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4),
    st.tuples(st.floats(0, 9), st.floats(0, 9)),
    st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3)),
)
def test_no_other_coefficients_fit_better(
    measured: list[tuple[float, float, float]], fixed: tuple[float, float], other: tuple[float, float, float]
) -> None:
    """Nothing related to the quantities is measured, so that as often as not a coefficient would be below 0."""
    cost = LinearCost((1.0, 1.0, 1.0))
    seen = [((1.0, a, b), abs(seconds - fixed[0] * a + fixed[1])) for a, b, seconds in measured]
    for x, seconds in seen:
        cost.observe(x, seconds)
    found = cost.coefficients()
    assert min(found) >= 0.0
    least = cost_of(found, seen)
    assert least <= cost_of(other, seen) * (1 + 1e-9) + 1e-9
    for i in range(3):
        for step in (1e-3, -1e-3):
            near = [max(0.0, t + step) if i == j else t for j, t in enumerate(found)]
            assert least <= cost_of(near, seen) * (1 + 1e-9) + 1e-9


def test_what_the_measurements_leave_open_keeps_its_value() -> None:
    """After a thousand steps of one kind, those of the other kind are still predicted as before."""
    cost, _ = fitted((0.010, 0.001))
    for _ in range(1000):
        cost.observe((1.0, 20.0), 0.030)
    assert cost.predict((1.0, 20.0)) == pytest.approx(0.030, rel=0.01)
    assert cost.predict((1.0, 50.0)) == pytest.approx(0.060, rel=0.1)
    assert cost.predict((1.0, 0.0)) == pytest.approx(0.010, rel=0.2)


def test_one_outlier_is_cut_down_and_a_second_is_believed() -> None:
    cost, _ = fitted((0.010, 0.001))
    cost.observe((1.0, 20.0), 60.0)  # the process was suspended for a minute
    assert cost.predict((1.0, 20.0)) < 0.045
    for _ in range(30):
        cost.observe((1.0, 20.0), 0.030)
    assert cost.predict((1.0, 20.0)) == pytest.approx(0.030, rel=0.1)
    for _ in range(5):
        cost.observe((1.0, 20.0), 0.300)
    assert cost.predict((1.0, 20.0)) > 0.100


def test_a_machine_that_turns_faster_or_slower_is_followed() -> None:
    cost, rng = fitted((0.010, 0.001))
    for factor in (8.0, 0.25):
        for _ in range(60):
            n = float(rng.integers(0, 60))
            cost.observe((1.0, n), factor * (0.010 + 0.001 * n))
        assert cost.predict((1.0, 40.0)) == pytest.approx(factor * 0.050, rel=0.1)
