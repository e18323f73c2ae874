"""RMSNorm, SwiGLU, rotary embedding and exp against NumPy; rows independent of each other and of threads."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference
from miro_cy.batch import BatchView

property_test = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = {"seed": st.integers(0, 2**32), "m": st.integers(1, 9), "k": st.integers(1, 90)}


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@property_test
@given(**sizes)
def test_add_rmsnorm_equals_reference(isa, seed, m, k):
    rng = np.random.default_rng(seed)
    x, delta, bias, weight = normal(rng, m, k), normal(rng, m, k), normal(rng, k), normal(rng, k)
    total = x.copy()
    got = ops.add_rmsnorm(total, weight, 1e-5, delta, bias, threads=2)
    np.testing.assert_array_equal(total, x + delta + bias)
    np.testing.assert_allclose(got, reference.rmsnorm(total, weight, 1e-5), rtol=2e-6, atol=1e-7)
    alone = total[-1:].copy()
    np.testing.assert_array_equal(ops.add_rmsnorm(alone, weight, 1e-5)[0], got[-1])


@property_test
@given(**sizes)
def test_swiglu_equals_reference(isa, seed, m, k):
    rng = np.random.default_rng(seed)
    gate, up = normal(rng, m, k) * 20, normal(rng, m, k)
    np.testing.assert_allclose(ops.swiglu(gate, up, threads=2), reference.swiglu(gate, up), rtol=2e-6, atol=1e-12)
    gb, ub = normal(rng, k), normal(rng, k)
    np.testing.assert_allclose(
        ops.swiglu(gate, up, gb, ub), reference.swiglu(gate + gb, up + ub), rtol=2e-6, atol=1e-12
    )


def two_rows():
    """A view of tokens at positions 5, 6, 7 of one sequence and 0 to 6 of another, and those positions."""
    view = BatchView(4, 64, np.zeros((1, 4, 1), np.int32))
    view.add_row(1, 5, np.zeros(3, np.int32), 1)
    view.add_row(0, 0, np.zeros(7, np.int32), 1)
    return view, np.array([5, 6, 7, *range(7)], np.int32)


def rotation(rng, half):
    angles = rng.uniform(0, 6, (16, half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


heads_of = {
    "seed": st.integers(0, 2**32),
    "heads": st.integers(1, 4),
    "half": st.integers(1, 20),
    "extra": st.integers(0, 5),
}


@property_test
@given(**heads_of)
def test_rope_equals_reference(isa, seed, heads, half, extra):
    rng = np.random.default_rng(seed)
    d = 2 * half + extra
    view, positions = two_rows()
    cos, sin = rotation(rng, half)
    x, bias = normal(rng, 10, heads, d), normal(rng, heads * d)
    got = x.copy()
    ops.rope(view, got, cos, sin, bias, threads=2)
    np.testing.assert_allclose(
        got, reference.rope(x + bias.reshape(heads, d), positions, cos, sin), rtol=1e-5, atol=1e-6
    )


@property_test
@given(biased=st.booleans(), **heads_of)
def test_rope_of_normed_heads_equals_reference(isa, seed, heads, half, extra, biased):
    """Each head by itself, after the bias; the bits of a token whatever shares its step, and by whichever thread."""
    rng = np.random.default_rng(seed)
    d = 2 * half + extra
    view, positions = two_rows()
    cos, sin = rotation(rng, half)
    scale = np.exp(rng.uniform(-6, 6, (10, heads, 1))).astype(np.float32)  # heads of very different sizes
    x, norm = normal(rng, 10, heads, d) * scale, normal(rng, d)
    bias = normal(rng, heads * d) if biased else None
    got = x.copy()
    ops.rope(view, got, cos, sin, bias, threads=2, norm=norm, eps=1e-3)
    total = x if bias is None else x + bias.reshape(heads, d)
    want = reference.rope(total, positions, cos, sin, norm, 1e-3)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    last = BatchView(1, 1, np.zeros((1, 1, 1), np.int32))
    last.add_row(0, 6, np.zeros(1, np.int32), 1)
    alone = x[-1:].copy()
    ops.rope(last, alone, cos, sin, bias, norm=norm, eps=1e-3)
    np.testing.assert_array_equal(alone[0], got[-1])


def test_the_norm_of_heads_has_their_size(isa):
    view, _ = two_rows()
    with pytest.raises(ValueError, match="shapes differ"):
        ops.rope(view, np.ones((10, 2, 4), np.float32), *np.ones((2, 16, 2), np.float32), norm=np.ones(8, np.float32))


def test_exp_is_accurate_and_safe(isa):
    x = np.linspace(-87, 88, 20001, dtype=np.float32)
    np.testing.assert_allclose(ops.exp(x), np.exp(x.astype(np.float64)), rtol=3e-7)
    special = ops.exp(np.array([-np.inf, -200, 0, 200, np.inf, np.nan], np.float32))
    np.testing.assert_array_equal(special[:3], [0, 0, 1])
    assert special[3] == special[4] == np.inf
    assert np.isnan(special[5])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rmsnorm_passes_non_finite_on(bad):
    x = np.ones((2, 40), np.float32)
    x[1, 7] = bad
    y = ops.add_rmsnorm(x, np.ones(40, np.float32), 1e-5)
    assert np.isfinite(y[0]).all()
    assert not np.isfinite(y[1]).all()
    view, _ = two_rows()
    heads = np.ones((10, 2, 4), np.float32)
    heads[3, 1, 2] = bad
    ops.rope(view, heads, *np.ones((2, 16, 2), np.float32), norm=np.ones(4, np.float32), eps=1e-5)
    whole = np.isfinite(heads).all(axis=2)
    assert not whole[3, 1]
    assert whole.sum() == whole.size - 1
