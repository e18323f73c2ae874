"""Matmuls in tile registers: their twin's bits, in every shape and for weights of every size, and how far from exact.

Where the twin is left alone: it does not say that the instruction takes subnormal floats for zero, which sums of
activations below 1e-30 may be.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference, reference_tiles, select
from miro_cy._kernels.weights import PackedWeights

KINDS = {"Q8_0": 32, "Q4_0": 32, "Q4_1": 32, "Q6_K": 256}  # k of a file's block
#: Where blocks have their scales, and bytes of a block.
SCALES = {"Q8_0": ((0,), 34), "Q4_0": ((0,), 18), "Q4_1": ((0, 2), 20), "Q6_K": ((208,), 210)}
#: Scales from a half's least to about its largest.
SIZES = [0.0, 6e-8, 3e-7, 1e-5, 1e-3, 0.1, 3.0, 600.0, 60_000.0]
property_test = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[select.TILES], autouse=True)
def isa(request):
    if request.param not in select.available():
        pytest.skip("this machine has no tile registers, or the compiler does not know them")
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


def scaled(rng, kind, n, k, size):
    """Bytes of a random matrix; size [n]: each row's scales (and minima)."""
    raw = reference.random_raw(rng, kind, n, k)
    at, block = SCALES[kind]
    blocks = raw.reshape(n, -1, block)
    for offset in at:
        spread = rng.uniform(0.5, 1, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        halves = (spread * np.array(size)[:, None]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return raw


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def assert_same_bits(got, want):
    assert got.shape == want.shape
    different = np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))
    assert not different.size, f"{different.size} of {got.size}, at first {different[0]}"


def error_bound(x, raw, kind, n):
    """Most that a product may be off [m, n].

    Activations are rounded to 8 bits, weights to 11 and then cut to 8, and all is 1.00247 times as large: from
    1.00247 * (1 - 2**-7) (1 - 2**-8) (1 - 2**-11) to 1.00247 * (1 + 2**-8) (1 + 2**-11) of what it is, so 0.98 % off.
    With minima, what eight steps and the minimum come to is rounded to 11 bits by itself. What is below a half's normal
    numbers, when the panel's largest lie under 2**15, becomes zero.
    """
    k = x.shape[1]
    size = np.abs(x).astype(np.float64)
    weight = np.abs(reference.dequantise(raw, kind, n, k)).astype(np.float64)
    _, d, m, limit = reference.parts(raw, kind, n, k)
    extra = 2.0 ** (-14.0 - reference_tiles.exponents(limit, m))[:, None]
    if m is not None:
        extra = extra + np.abs(8 * d + m) * 2.0**-11
    return size @ (0.0098 * weight + extra).T + 1e-36 * k


@property_test
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_matmul_has_the_twins_bits(kind, data):
    m = data.draw(st.integers(1, 70), label="m")
    n = data.draw(st.integers(1, 100), label="n")
    k = data.draw(st.integers(1, 4096 // KINDS[kind]), label="k blocks") * KINDS[kind]
    threads = data.draw(st.integers(1, 4), label="threads")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    raw = reference.random_raw(rng, kind, n, k)
    x = normal(rng, m, k) * np.float32(data.draw(st.sampled_from([1e-3, 1.0, 1e4]), label="size"))
    got = ops.matmul(PackedWeights(raw, kind, n, k, 2), x, True, threads)
    assert_same_bits(got, reference_tiles.matmul(x, raw, kind, n))


@pytest.mark.parametrize("k", [256, 1024, 1280, 2048, 2304, 4096, 5120])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_k_go_on_where_the_last_one_ended(rng, kind, k):
    """Around what one run takes, for rows whose opened weights are kept, or not; n has odd panels."""
    raw = reference.random_raw(rng, kind, 37, k)
    packed = PackedWeights(raw, kind, 37, k)
    x = normal(rng, 67, k)
    want = reference_tiles.matmul(x, raw, kind, 37)
    for m in (1, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 67):
        assert_same_bits(ops.matmul(packed, x[:m], True, 1 + m % 3), want[:m])


@pytest.mark.parametrize("kind", [*KINDS, "F16", "BF16"])
def test_threads_continue_sums_of_each_other(rng, kind):
    """Several runs of k, more threads than CPUs: a run begins when all threads have stored theirs of the last one."""
    packed = PackedWeights(reference.random_raw(rng, kind, 384, 6144), kind, 384, 6144)
    x, rounds = normal(rng, 100, 6144), kind in KINDS
    want = ops.matmul(packed, x, rounds)
    for threads in (2, 3, 5, 8, 5, 8, 5, 8):
        np.testing.assert_array_equal(ops.matmul(packed, x, rounds, threads), want)


@property_test
@given(
    seed=st.integers(0, 2**32),
    panels=st.lists(st.sampled_from(SIZES), min_size=1, max_size=5),
    m=st.sampled_from([1, 17, 40]),
    mixed=st.booleans(),
)
@pytest.mark.parametrize("kind", KINDS)
def test_panels_of_any_size(kind, seed, panels, m, mixed):
    """A size for each panel, or for each row of all panels: the twin's bits, and as near to exact as they must be."""
    rng = np.random.default_rng(seed)
    n, k = 16 * len(panels) - int(rng.integers(0, 15)), 512
    size = rng.choice(panels, n) if mixed else np.repeat(panels, 16)[:n]
    raw = scaled(rng, kind, n, k, size)
    x = normal(rng, m, k)
    got = ops.matmul(PackedWeights(raw, kind, n, k), x, True, 2)
    assert_same_bits(got, reference_tiles.matmul(x, raw, kind, n))
    want = reference.matmul(x, reference.dequantise(raw, kind, n, k))
    assert (np.abs(got - want) <= error_bound(x, raw, kind, n)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_weights_there_can_be(rng, kind):
    raw = reference.random_raw(rng, kind, 32, 256)
    at, block = SCALES[kind]
    for offset in at:
        raw.reshape(-1, block)[:, offset : offset + 2] = np.array([65504], np.float16).view(np.uint8)
    x = normal(rng, 3, 256)
    got = ops.matmul(PackedWeights(raw, kind, 32, 256), x, True)
    assert_same_bits(got, reference_tiles.matmul(x, raw, kind, 32))
    want = reference.matmul(x, reference.dequantise(raw, kind, 32, 256))
    assert (np.abs(got - want) <= error_bound(x, raw, kind, 32)).all()


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-3, 1.0, 1e8])
@pytest.mark.parametrize("kind", KINDS)
def test_distance_from_exact(rng, kind, size):
    raw = reference.random_raw(rng, kind, 80, 1024)
    x = (normal(rng, 64, 1024).clip(-2, 2) * size).astype(np.float32)
    got = ops.matmul(PackedWeights(raw, kind, 80, 1024), x, True)
    assert np.isfinite(got).all()
    want = reference.matmul(x, reference.dequantise(raw, kind, 80, 1024))
    assert (np.abs(got - want) <= error_bound(x, raw, kind, 80)).all()
    if size > 1e-30:  # neither too large nor too small on average, though weights are cut off
        assert abs((got * want).sum() / (want * want).sum() - 1) < 1.2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_activations_too_large_are_never_finite_and_wrong(rng, kind):
    raw = reference.random_raw(rng, kind, 20, 256)
    packed, w = PackedWeights(raw, kind, 20, 256), reference.dequantise(raw, kind, 20, 256)
    sizes = np.geomspace(1e7, 1e38, 125).astype(np.float32)
    x = np.sign(normal(rng, len(sizes), 256)) * sizes[:, None]
    got, want = ops.matmul(packed, x, True), reference.matmul(x, w)
    finite = np.isfinite(got)
    assert finite[sizes <= 2e8].all()
    assert not finite[sizes >= 3e8].any()
    assert (np.abs(got - want) <= error_bound(x, raw, kind, 20))[finite].all()
    one = np.zeros((1, 256), np.float32)
    one[0, 77] = 1e30
    assert not np.isfinite(ops.matmul(packed, one, True)).any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_not_finite_reach_their_outputs(rng, kind, bad):
    """Opened weights cannot say so: no output of the panel is finite, and no other one is touched."""
    raw = reference.random_raw(rng, kind, 50, 512)
    at, block = SCALES[kind]
    x = normal(rng, 40, 512)
    want = ops.matmul(PackedWeights(raw, kind, 50, 512), x, True)
    for offset in at:
        broken = raw.copy()
        broken.reshape(50, -1, block)[20, -1, offset : offset + 2] = np.array([bad], np.float16).view(np.uint8)
        got = ops.matmul(PackedWeights(broken, kind, 50, 512), x, True)
        assert not np.isfinite(got[:, 20]).any()
        assert_same_bits(np.delete(got, np.s_[16:32], 1), np.delete(want, np.s_[16:32], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_whichever_level_packs(rng, isa, kind):
    """An engine's weights are packed by the level in use, and multiplied by the one with tile registers."""
    raw = scaled(rng, kind, 45, 512, rng.choice(SIZES, 45))
    x = normal(rng, 5, 512)
    want = ops.matmul(PackedWeights(raw, kind, 45, 512), x, True)
    for level in select.available():
        select.use(level)
        packed = PackedWeights(raw, kind, 45, 512)
        select.use(isa)
        assert_same_bits(ops.matmul(packed, x, True), want)


def test_rounded_has_the_twins_bits():
    """Ties, both zeros, what overflows, what is subnormal; whichever threads, and rows that end a tile early."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, (70, 2048), np.uint32)
    bits[0, :8] = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x4D7FB011, 0x4D800000, 0x7F7FFFFF]
    x = bits.view(np.float32)
    x = np.where(np.isnan(x), np.float32(1), x)
    want = reference_tiles.rounded(x)
    with np.errstate(over="ignore"):
        wide = x * (np.float32(2.0**100) * np.float32(1.00247))
    assert ((wide.view(np.uint32) & 0xFFFF) == 0x8000).any(), "no tie among them"
    for m, threads in ((70, 1), (70, 3), (17, 2), (1, 2)):
        (values,) = ops.quantise(x[:m], threads)
        assert_same_bits(values, want[:m])
    x[3, 5] = np.nan
    assert np.isnan(ops.quantise(x)[0][3, 5])
