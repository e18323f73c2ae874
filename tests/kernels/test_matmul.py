"""Matmul over packed weights: against NumPy, and the same bits for a row whatever shares the call."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference, reference_tiles, select
from miro_cy._kernels.weights import FORMATS, PackedWeights

QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q6_K"]
MODES = [(kind, False) for kind in FORMATS] + [(kind, True) for kind in QUANTISED]


def make(rng, kind, n, k):
    raw = reference.random_raw(rng, kind, n, k)
    return PackedWeights(raw, kind, n, k, 2), reference.dequantise(raw, kind, n, k)


def step(kind):
    return FORMATS[kind][7]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_weight_survives_packing_bit_for_bit(rng, kind):
    for n, blocks in ((1, 1), (16, 2), (37, 3)):
        packed, w = make(rng, kind, n, blocks * max(step(kind), 24))
        rows = rng.permutation(n).astype(np.int32)
        np.testing.assert_array_equal(ops.embed(packed, rows, threads=2), w[rows])


def test_every_bfloat16_is_widened_exactly(isa):
    """All 65,536 of them, by the lookup and by the tiles: subnormals and signed zeros too.

    Tile registers take subnormals for zero, and 0 * infinity is a part of their sums.
    """
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[np.isfinite(reference.bfloat16(bits.view(np.uint8)))]
    n, k = 544, 120  # 65,280 of them are finite
    raw = finite.reshape(-1)
    assert raw.size == n * k
    packed = PackedWeights(raw.view(np.uint8), "BF16", n, k)
    want = reference.bfloat16(raw.view(np.uint8)).reshape(n, k)
    got = ops.embed(packed, np.arange(n, dtype=np.int32))
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    for at in (0, 1, 64, k - 1):
        one = np.zeros((3, k), np.float32)
        one[:, at] = 1
        column = want[:, at].copy()
        if isa == select.TILES:
            column[np.abs(column) < np.finfo(np.float32).tiny] = 0
        np.testing.assert_array_equal(ops.matmul(packed, one, False), np.tile(column, (3, 1)))
    special = reference.bfloat16(np.array([0x7F80, 0xFF80, 0x7FC0], np.uint16).view(np.uint8))
    packed = PackedWeights(np.array([0x7F80, 0xFF80, 0x7FC0], np.uint16).view(np.uint8), "BF16", 3, 1)
    got = ops.matmul(packed, np.ones((1, 1), np.float32), False)[0]
    if isa == select.TILES:
        assert not np.isfinite(got).any()
    else:
        np.testing.assert_array_equal(got, special)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize(("kind", "fast"), MODES)
def test_matmul_equals_reference(isa, kind, fast, data):
    m = data.draw(st.integers(1, 20), label="m")
    n = data.draw(st.integers(1, 100), label="n")
    blocks = data.draw(st.integers(1, 3 if kind == "Q6_K" else 40), label="k blocks")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    k = blocks * step(kind)
    packed, w = make(rng, kind, n, k)
    x = rng.standard_normal((m, k)).astype(np.float32)
    if fast and select.rounds_to() == "bfloat16":
        pytest.skip("test_tiles.py compares tiles with their twin, bit for bit")
    want = reference.matmul_fast(*ops.quantise(x)[:2], w) if fast else reference.matmul(x, w)
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    error = np.abs(ops.matmul(packed, x, fast, threads=2) - want)
    assert (error <= 3e-6 * size + 1e-6).all()


@pytest.mark.parametrize(("kind", "fast"), MODES)
def test_batch_invariance_of_matmul(rng, kind, fast):
    """A row's bits depend on neither the number of rows (1 to 70) nor the threads, at odd n and k."""
    for n, k in ((77, 256), (35, 1280), (21, 333 if step(kind) == 1 else 768)):
        packed, _ = make(rng, kind, n, k)
        x = rng.standard_normal((300, k)).astype(np.float32)
        want = ops.matmul(packed, x, fast)
        for m in [*range(1, 71), 97, 257]:
            got = ops.matmul(packed, x[:m], fast, threads=1 + m % 3)
            np.testing.assert_array_equal(got, want[:m])


@pytest.mark.parametrize(("kind", "fast"), [("F32", False), ("F16", False), ("Q4_0", False), ("Q8_0", True)])
def test_threads_continue_sums_of_each_other(rng, kind, fast):
    """Several runs of k, more threads than CPUs: a run begins when all threads have stored theirs of the last one."""
    packed, _ = make(rng, kind, 384, 3072)
    x = rng.standard_normal((100, 3072)).astype(np.float32)
    want = ops.matmul(packed, x, fast)
    for threads in (2, 3, 5, 8, 5, 8, 5, 8):
        np.testing.assert_array_equal(ops.matmul(packed, x, fast, threads=threads), want)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_non_finite_activation_reaches_every_output(rng, kind):
    packed, _ = make(rng, kind, 20, 256)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.zeros((2, 256), np.float32)
        x[1, 3] = bad
        y = ops.matmul(packed, x, True)
        assert np.isfinite(y[0]).all()
        assert not np.isfinite(y[1]).any()


def test_saturation_is_impossible(rng):
    """Extreme bytes against extreme activations: pairs of u8 x s8 products saturate int16 where they can."""
    for kind in QUANTISED:
        packed_raw = reference.random_raw(rng, kind, 16, 256)
        packed_raw.reshape(-1, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q6_K": 210}[kind])[:, 4:128] = 255
        if kind == "Q8_0":
            packed_raw.reshape(-1, 34)[:, 2:] = 128
        packed = PackedWeights(packed_raw, kind, 16, 256)
        w = reference.dequantise(packed_raw, kind, 16, 256)
        for sign in (1, -1):
            x = np.full((3, 256), sign * 5.0, np.float32)
            got = ops.matmul(packed, x, True)
            if select.rounds_to() == "bfloat16":
                np.testing.assert_array_equal(got, reference_tiles.matmul(x, packed_raw, kind, 16))
            else:
                np.testing.assert_allclose(got, reference.matmul_fast(*ops.quantise(x)[:2], w), rtol=2e-5, atol=1e-3)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="cannot have"):
        PackedWeights(np.zeros(10, np.uint8), "Q4_0", 1, 32)
    with pytest.raises(ValueError, match="no packed layout"):
        PackedWeights(np.zeros(10, np.uint8), "Q9", 1, 32)
