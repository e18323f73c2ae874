"""Rounded activations: int8 with scales, or bfloat16 where there are tile registers; and SwiGLU that ends in them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference, reference_tiles, select
from miro_cy._kernels.weights import PackedWeights

QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q6_K"]


def make(rng, kind, n, k):
    raw = reference.random_raw(rng, kind, n, k)
    return PackedWeights(raw, kind, n, k, 2), reference.dequantise(raw, kind, n, k)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    m=st.integers(1, 9),
    blocks=st.integers(1, 9),
    scale=st.sampled_from([1e-38, 1e-3, 1.0, 1e30]),
)
def test_quantise_equals_reference(isa, seed, m, blocks, scale):
    x = (np.random.default_rng(seed).standard_normal((m, 32 * blocks)) * scale).astype(np.float32)
    if select.rounds_to() == "bfloat16":
        (values,) = ops.quantise(x, threads=2)
        np.testing.assert_array_equal(values.view(np.uint32), reference_tiles.rounded(x).view(np.uint32))
        return
    q, d, total, dsum = ops.quantise(x, threads=2)
    want_q, want_d = reference.quantise(x)
    np.testing.assert_array_equal(d, want_d)
    assert np.abs(q.astype(int) - want_q).max() <= (isa in ("generic", "v2"))  # without FMA, x / d is rounded twice
    np.testing.assert_array_equal(total, q.reshape(m, -1, 16).sum(axis=2, dtype=np.int32))
    np.testing.assert_allclose(
        dsum, (d * total).reshape(m, -1, 2).sum(axis=2), rtol=1e-5, atol=1e-5 * np.abs(d * total).max()
    )


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_of_rounded_rows_is_matmul_swiglu_and_quantise_bit_for_bit(rng, kind, biased):
    """At every row count of a tile, past several tiles, and past what one pass over the rows takes."""
    for n, k in ((96, 256), (32, 1280)):
        gate, up = make(rng, kind, n, k)[0], make(rng, kind, n, k)[0]
        biases = [rng.standard_normal(n).astype(np.float32) if biased else None for _ in range(2)]
        x = rng.standard_normal((300, k)).astype(np.float32)
        h = ops.swiglu(ops.matmul(gate, x, True), ops.matmul(up, x, True), *biases)
        want = ops.quantise(h)
        for m in [*range(1, 19), 64, 255, 256, 257, 300]:
            got = ops.swiglu_i8(gate, up, x[:m], *biases, threads=1 + m % 3)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b[:m])


def test_swiglu_of_rounded_rows_equals_reference(rng):
    gate, w_gate = make(rng, "Q4_1", 64, 256)
    up, w_up = make(rng, "Q4_1", 64, 256)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    if select.rounds_to() == "bfloat16":
        factors = [ops.matmul(w, x, True) for w in (gate, up)]  # test_tiles.py says what those are
        want = reference.swiglu(*factors)
        got = ops.swiglu_i8(gate, up, x)[0] / (2.0**100 * 1.00247)
        assert (np.abs(got - want) <= (2.0**-8 + 1e-5) * np.abs(want) + 1e-30).all()
        return
    q, d = ops.quantise(x)[:2]
    want = reference.swiglu(*(reference.matmul_fast(q, d, w).astype(np.float32) for w in (w_gate, w_up)))
    got_q, got_d = ops.swiglu_i8(gate, up, x)[:2]
    got = got_q.reshape(5, -1, 16) * got_d[..., None]
    step = np.abs(want.reshape(5, -1, 16)).max(-1, keepdims=True) / 127
    assert (np.abs(got - want.reshape(5, -1, 16)) <= 0.51 * step + 1e-5 * np.abs(want).max()).all()


def test_swiglu_of_rounded_rows_refuses_what_it_cannot_hold(rng):
    gate, odd, floats = make(rng, "Q4_0", 32, 64)[0], make(rng, "Q4_0", 37, 64)[0], make(rng, "F16", 32, 64)[0]
    x, bias = np.ones((1, 64), np.float32), np.ones(32, np.float32)
    for args in ((odd, odd, x), (gate, odd, x), (floats, floats, x), (gate, gate, x[:, :32]), (gate, gate, x, bias)):
        with pytest.raises(ValueError, match="SwiGLU"):
            ops.swiglu_i8(*args)
