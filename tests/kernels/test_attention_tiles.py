"""Attention in tile registers, over a KV cache of bfloat16: its twin's bits, and what no row may see of others."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference_tiles, select
from miro_cy.batch import BatchView

Sequences: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))["Sequences"]


@pytest.fixture(params=[select.TILES], autouse=True)
def isa(request):
    if request.param not in select.available():
        pytest.skip("this machine has no tile registers, or the compiler does not know them")
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    group=st.sampled_from([1, 2, 3, 5, 16, 17, 40]),
    kv_heads=st.integers(1, 2),
    d=st.sampled_from([4, 16, 20, 64, 80, 128]),
    block_size=st.sampled_from([16, 32, 64]),
    length=st.integers(1, 200),
    soft_cap=st.sampled_from([0.0, 5.0]),
    window=st.sampled_from([0, 1, 50, 100]),
)
def test_attention_has_its_twins_bits(seed, group, kv_heads, d, block_size, length, soft_cap, window):
    """But for the order in which a tile's weights are summed."""
    rng = np.random.default_rng(seed)
    s = Sequences(rng, [length], group * kv_heads, kv_heads, d, block_size, "bf16")
    split = int(rng.integers(0, length))
    if split:
        s.run([(0, 0, split)], window=window, soft_cap=soft_cap, threads=2)
    got = s.run([(0, split, length - split)], window=window, soft_cap=soft_cap, threads=2)[0]
    want = reference_tiles.attention(s.q[0][split:], *s.stored(0), split, 0.2, soft_cap, window, ops.exp)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("length", [513, 1100])
def test_ranges_merge_as_the_twin_has_it(rng, length):
    s = Sequences(rng, [length], 3, 1, 64, 32, "bf16")
    s.run([(0, 0, length - 20)])
    got = s.run([(0, length - 20, 20)])[0]
    want = reference_tiles.attention(s.q[0][-20:], *s.stored(0), length - 20, 0.2, 0, 0, ops.exp)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("group", "block_size"), [(1, 32), (3, 16), (5, 64), (17, 32), (40, 32)])
def test_values_that_are_not_finite_change_nobody_elses_bits(group, block_size, window, bad):
    """A weight of zero times such a value is no zero: who does not see it has the bits it has alone."""
    outs = []
    for of in ((), (30, 70)):
        s = Sequences(np.random.default_rng(9), [150], group, 1, 32, block_size, "bf16")
        for at in of:
            s.v[0][at, 0, 5] = bad
        outs.append(s.run([(0, 0, 150)], window=window, threads=2)[0])
    rows = np.arange(150)
    sees = sum((rows >= at) & ((rows < at + window) | (window == 0)) for at in (30, 70)) > 0
    np.testing.assert_array_equal(outs[1][~sees].view(np.uint32), outs[0][~sees].view(np.uint32))
    assert not np.isfinite(outs[1][sees][:, :, 5]).any()
    others = np.delete(outs[0], 5, axis=2).view(np.uint32)
    np.testing.assert_array_equal(np.delete(outs[1], 5, axis=2).view(np.uint32), others)


@pytest.mark.parametrize("window", [0, 4, 7, 40])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 32), (17, 64)])
def test_values_that_are_not_finite_anywhere_change_nobody_elses_bits(group, block_size, window):
    """Of any token, the last one and those in the other half of a pair too, and in any panel."""
    for length in (63, 68):

        def run(at=None, group=group, length=length):
            s = Sequences(np.random.default_rng(9), [length], group, 1, 32, block_size, "bf16")
            if at is not None:
                s.v[0][at, 0, 11 + 16 * (at % 2)] = np.nan
            return s.run([(0, 0, length)], window=window)[0]

        alone, rows = run().view(np.uint32), np.arange(length)
        for at in range(length):
            got = run(at)
            sees = (rows >= at) & ((rows < at + window) | (window == 0))
            np.testing.assert_array_equal(got[~sees].view(np.uint32), alone[~sees])
            assert np.isnan(got[sees][:, :, 11 + 16 * (at % 2)]).all()


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    d=st.sampled_from([4, 16, 20, 64, 80]),
    block_size=st.sampled_from([16, 32, 64]),
    length=st.integers(1, 130),
    size=st.sampled_from([1e-20, 1e-3, 1, 1e3, 1e30]),
)
def test_what_is_stored(seed, d, block_size, length, size):
    """Rounded to nearest, in chunks or not; what fills keys up is zero."""
    s = Sequences(np.random.default_rng(seed), [length], 3, 3, d, block_size, "bf16")
    s.k[0] *= size
    s.v[0] *= size
    first = length // 2
    for row in ((0, 0, first), (0, first, length - first)):
        if row[2]:
            s.run([row], threads=2)
    for got, x in zip(s.stored(0), (s.k[0], s.v[0]), strict=True):
        np.testing.assert_array_equal(got, reference_tiles.nearest(x))


@pytest.mark.parametrize("rows", [[(0, 0, 2)], [(0, 0, 1), (1, 0, 2), (2, 0, 1)], [(0, 0, 4), (1, 0, 6)]])
def test_no_two_threads_write_one_pair(rng, rows):
    """Two tokens that are neighbours, which two threads would write at the same time if each took its share."""
    for _ in range(300):
        s = Sequences(rng, [n for _, _, n in rows], 4, 4, 128, 16, "bf16")
        s.run(rows, threads=2)
        for i in range(len(rows)):
            for got, x in zip(s.stored(i), (s.k[i], s.v[i]), strict=True):
                np.testing.assert_array_equal(got, reference_tiles.nearest(x))


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "rows", [[(0, 0, 2)], [(0, 1, 8)], [(0, 0, 1), (1, 3, 2), (2, 0, 1)], [(0, 5, 40), (1, 16, 41), (2, 0, 7)]]
)
def test_each_pair_is_one_threads(rows, threads):
    """Every token is in one share, and so is its neighbour: a thread reads and writes both."""
    rng = np.random.default_rng(2)
    s = Sequences(rng, [first + n for _, first, n in rows], 1, 1, 32, 16, "bf16")
    view = BatchView(len(rows), 4096, s.tables)
    for i, first, n in rows:
        view.add_row(i, first, np.zeros(n, np.int32), 1)
    k, v = (rng.standard_normal((view.n_tokens, 1, 32)).astype(np.float32) for _ in range(2))
    by_pair, by_token = [], []
    for share in range(threads):
        store = ops.KVStore(len(s.store.arrays.k), 1, 32, 16, "bf16")
        store.write(view, k, v, threads, share=share)
        written = store.arrays.v[:, 0, 0, :, 0, :] != 0x7FC0  # [blocks, pairs, tokens of a pair]
        by_token.append(written)
        by_pair.append(written.any(axis=2))
    assert (np.sum(by_pair, axis=0) <= 1).all()
    assert np.sum(by_token) == view.n_tokens


@pytest.mark.parametrize("d", [4, 20, 64, 80])
def test_a_bias_of_the_values_is_added_before_they_are_rounded(rng, d):
    s = Sequences(rng, [50], 3, 3, d, 16, "bf16")
    bias = rng.standard_normal((3, d)).astype(np.float32)
    view = BatchView(1, 4096, s.tables)
    view.add_row(0, 0, np.zeros(50, np.int32), 1)
    s.store.write(view, s.k[0], s.v[0], 2, v_bias=bias.reshape(-1))
    k, v = s.stored(0)
    np.testing.assert_array_equal(k, reference_tiles.nearest(s.k[0]))
    np.testing.assert_array_equal(v, reference_tiles.nearest(s.v[0] + bias))


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("group", "d"), [(1, 20), (3, 48), (8, 64), (40, 16)])
def test_batch_invariance_of_attention(group, d, window):
    """One row at a time, in chunks of 7 or 512, among others, at every block size and thread count: the same bits."""
    lengths = [650, 90, 1]
    want = None
    for block_size in (16, 32, 64):
        for chunk, threads in ((650, 1), (512, 2), (7, 1), (1, 2)):
            s = Sequences(np.random.default_rng(3), lengths, group * 2, 2, d, block_size, "bf16")
            out = []
            for at in range(0, lengths[0], chunk):
                rows = [(0, at, min(chunk, lengths[0] - at))]
                if at < lengths[1] and chunk < 512:
                    rows.append((1, at, min(chunk, lengths[1] - at)))
                out.append(s.run(rows, window=window, threads=threads)[0])
            got = np.concatenate(out).view(np.uint32)
            want = got if want is None else want
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("of", ["k", "v"])
def test_what_is_not_finite_reaches_the_output(of):
    """Of all who see it, in the heads that share it; nobody before, and no other KV head."""
    s = Sequences(np.random.default_rng(4), [150], 6, 2, 20, 16, "bf16")
    getattr(s, of)[0][70, 1, 3] = np.nan
    out = s.run([(0, 0, 150)], threads=2)[0]
    assert np.isnan(out[70:, 3:, 3]).all()
    assert np.isfinite(out[:70]).all()
    assert np.isfinite(out[:, :3]).all()


@pytest.mark.parametrize(("group", "d"), [(3, 64), (1, 32), (2, 48), (4, 80)])
def test_output_is_rounded_as_quantise_does(rng, group, d):
    s = Sequences(rng, [100, 9, 33], group * 2, 2, d, 32, "bf16")
    s.run([(0, 0, 60), (1, 0, 8), (2, 0, 32)])
    view = BatchView(3, 4096, s.tables)
    for i, first, n in ((0, 60, 40), (1, 8, 1), (2, 32, 1)):
        view.add_row(i, first, np.zeros(n, np.int32), 1)
    q = rng.standard_normal((42, group * 2, d)).astype(np.float32)
    for threads in (1, 2, 3):
        out, parts = s.store.attend(view, q, 0.2, threads=threads, quantised=True)
        for got, want in zip(parts, ops.quantise(out.reshape(42, -1)), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("value", [1 + 2**-8, 1 + 3 * 2**-8, 3e38, -3.4e38, 1e-40, -0.0, np.inf, -np.inf, np.nan])
def test_rounding_to_bfloat16(value):
    """Ties go to even, what is too large becomes infinite, a NaN stays one."""
    store = ops.KVStore(1, 1, 16, 16, "bf16")
    view = BatchView(1, 1, np.zeros((1, 1, 1), np.int32))
    view.add_row(0, 0, np.zeros(1, np.int32), 1)
    values = np.full((1, 1, 16), value, np.float32)
    store.write(view, values, values)
    for bits in (store.arrays.k[0, 0, 0, 0, :8, 0], store.arrays.v[0, 0, 0, 0, :, 0]):
        got = (bits.astype(np.uint32) << 16).view(np.float32)
        if np.isnan(value):
            assert np.isnan(got).all()
        else:
            with np.errstate(over="ignore"):
                want = reference_tiles.nearest(values[0, 0, :1])[0]
            assert (got.view(np.uint32) == np.float32(want).view(np.uint32)).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FBFFFFF])
def test_any_nan_stays_one(bits):
    """Whichever bits it has: those that bfloat16 has no room for may be all that make it one, or overflow."""
    store = ops.KVStore(1, 1, 16, 16, "bf16")
    view = BatchView(1, 1, np.zeros((1, 1, 1), np.int32))
    view.add_row(0, 0, np.zeros(1, np.int32), 1)
    values = np.full((1, 1, 16), bits, np.uint32).view(np.float32)
    store.write(view, values, values)
    for stored in (store.arrays.k[0, 0, 0, 0, :8, 0], store.arrays.v[0, 0, 0, 0, :, 0]):
        assert np.isnan((stored.astype(np.uint32) << 16).view(np.float32)).all()


def test_other_kernels_refuse_such_a_cache():
    select.use("generic")
    with pytest.raises(ValueError, match="tile registers"):
        ops.KVStore(1, 1, 16, 16, "bf16")
