"""Kernels over one row of logits: argmax, log-softmax, partial selection, draw."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference

property_test = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
rows = {"seed": st.integers(0, 2**32), "n": st.one_of(st.integers(1, 50), st.integers(4000, 9000))}


def logits(seed, n, decimals=None):
    x = (np.random.default_rng(seed).standard_normal(n) * 4).astype(np.float32)
    return x if decimals is None else x.round(decimals)


@property_test
@given(**rows)
def test_argmax_takes_the_lowest_id_on_ties(isa, seed, n):
    x = logits(seed, n, 0)
    assert ops.argmax(x) == int(np.argmax(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 17, 100])
def test_argmax_reports_non_finite_rows(bad, n):
    for at in (0, n // 2, n - 1):
        x = logits(1, n)
        x[at] = bad
        assert ops.argmax(x) == -1
    assert ops.argmax(np.full(n, -np.inf, np.float32)) == -1


@property_test
@given(**rows)
def test_log_softmax_equals_reference(isa, seed, n):
    x = logits(seed, n)
    np.testing.assert_allclose(ops.log_softmax(x), reference.log_softmax(x), rtol=1e-6, atol=4e-6)
    x[: n // 2] = -np.inf
    if n > 1:
        np.testing.assert_allclose(
            ops.log_softmax(x)[n // 2 :], reference.log_softmax(x)[n // 2 :], rtol=1e-6, atol=4e-6
        )


@property_test
@given(**rows, data=st.data())
def test_top_k_equals_reference(isa, seed, n, data):
    x = logits(seed, n, 1)
    k = data.draw(st.integers(1, n))
    got = ops.top_k(x, k)
    assert [i for i, _ in got] == reference.top_k(x, k)
    assert all(v == x[i] for i, v in got)


@property_test
@given(**rows, u=st.floats(0, 1), temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0]))
def test_draw_equals_reference(isa, seed, n, u, temperature):
    x = logits(seed, n)
    got = ops.draw(x, 1 / temperature, u)
    if got != reference.draw(x, 1 / temperature, u):  # u fell within rounding of a boundary
        near = {reference.draw(x, 1 / temperature, min(1, max(0, u + e))) for e in (-1e-5, 1e-5)}
        low, high = min(near), max(near)
        assert low <= got <= high


def test_draw_never_picks_an_impossible_token(isa):
    x = np.full(64, -np.inf, np.float32)
    x[[5, 9]] = 0
    assert {ops.draw(x, 1.0, u) for u in (0.0, 0.3, 0.5, 0.7, 1.0)} == {5, 9}


def test_philox_matches_the_published_vectors():
    # Random123's known-answer tests for philox4x32-10
    ones = 0xFFFFFFFF
    assert reference.philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert reference.philox((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
