"""Rotary frequencies against the formulas of the papers and of Meta's reference code, in float64."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from miro_cy.model.rope import RopeTables, inverse_frequencies, llama3_factors
from miro_cy.model.spec import RopeSpec


def plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def llama3(frequency: float, factor: float, low: float, high: float, original: int) -> float:
    """One frequency by Llama 3.1's rule."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize(("theta", "dim"), [(10000.0, 16), (10000.0, 80), (500000.0, 128), (1e6, 64), (1.0, 2)])
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.7])
def test_plain_and_linear(theta: float, dim: int, factor: float) -> None:
    want = np.array(plain(theta, dim)) / factor
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(theta, dim, factor)), want, rtol=5e-6)


@pytest.mark.parametrize(("theta", "dim"), [(500000.0, 128), (500000.0, 64), (10000.0, 16)])
@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 8.0, 64)]
)
def test_llama3(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> None:
    factors = llama3_factors(
        theta, dim, factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=original
    )
    want = [llama3(frequency, factor, low, high, original) for frequency in plain(theta, dim)]
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(theta, dim, factors=factors)), want, rtol=2e-5)
    assert len(set(factors)) > 2  # kept, divided, and at least one between
    assert all(np.float32(value) == value for value in factors)  # as a file would hold them


def test_tables_follow_the_frequencies() -> None:
    spec = RopeSpec(10000.0, 8, factor=2.0, factors=(1.0, 1.0, 3.0, 8.0))
    tables = RopeTables(spec, 300)
    tables.fill_to(300)
    angles = np.outer(np.arange(300), np.array(plain(10000.0, 8)) / 2 / np.array(spec.factors))
    np.testing.assert_allclose(tables.cos[:300], np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(tables.sin[:300], np.sin(angles), atol=2e-5)


def test_what_is_no_scaling() -> None:
    assert RopeSpec(1e4, 8).scaling == "none"
    assert RopeSpec(1e4, 8, 2.0).scaling == "linear"
    assert RopeSpec(1e4, 8, 2.0, (1.0,) * 4).scaling == "linear+factors"


def test_positions_far_into_a_text_turn_as_the_formula_says() -> None:
    """A scaling that is parsed and then forgotten reads well at first: the angles at 8,000 and 120,000 tell."""
    factors = llama3_factors(500000.0, 64, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    far = np.array([8191, 120_000])
    for spec, frequencies in (
        (RopeSpec(500000.0, 64, factors=factors), [llama3(f, 8.0, 1.0, 4.0, 8192) for f in plain(500000.0, 64)]),
        (RopeSpec(10000.0, 64, 4.0), [f / 4.0 for f in plain(10000.0, 64)]),
    ):
        tables = RopeTables(spec, 2**17)
        tables.fill_to(int(far[-1]) + 1)
        angles = np.outer(far, frequencies)
        # An angle of a float32 product: within its rounding, 120,000 * 2**-24 radians and a little.
        np.testing.assert_allclose(tables.cos[far], np.cos(angles), atol=3e-2)
        np.testing.assert_allclose(tables.sin[far], np.sin(angles), atol=3e-2)
        unscaled = np.cos(np.outer(far, plain(spec.theta, 64)))
        assert np.abs(tables.cos[far] - unscaled).max() > 0.5


def test_llama3_limits_that_float32_cannot_tell_apart() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factors = llama3_factors(
            1e4, 64, factor=8.0, low_freq_factor=1.0, high_freq_factor=1 + 1e-15, original_context=8192
        )
    assert set(factors) == {1.0, 8.0}
