"""Flash attention over paged blocks: against materialised attention, and invariant to how rows are batched."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference, select
from miro_cy.batch import BatchView

Sequences: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))["Sequences"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    d=st.sampled_from([4, 16, 20, 64, 80]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(["fp32", "fp16", "int8"]),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    soft_cap=st.sampled_from([0.0, 5.0]),
    window=st.sampled_from([0, 1, 50, 100]),
)
def test_attention_equals_reference(isa, seed, group, kv_heads, d, block_size, dtype, lengths, soft_cap, window):
    """Over K and V as they are stored, which `test_what_is_stored` compares with what was written."""
    rng = np.random.default_rng(seed)
    s = Sequences(rng, lengths, group * kv_heads, kv_heads, d, block_size, dtype)
    split = [int(rng.integers(0, n)) for n in lengths]
    first = [(i, 0, n) for i, n in enumerate(split) if n]
    if first:
        s.run(first, window=window, soft_cap=soft_cap, threads=2)
    rest = [(i, at, n - at) for i, (at, n) in enumerate(zip(split, lengths, strict=True))]
    for (i, at, _), got in zip(rest, s.run(rest, window=window, soft_cap=soft_cap, threads=2), strict=True):
        want = reference.attention(s.q[i][at:], *s.stored(i), at, 0.2, soft_cap, window)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    d=st.sampled_from([4, 16, 20, 64, 80]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(["fp32", "fp16", "int8"]),
    length=st.integers(1, 130),
    size=st.sampled_from([1e-20, 1e-3, 1, 1e3]),
)
def test_what_is_stored(isa, seed, d, block_size, dtype, length, size):
    """fp32 and fp16 to the bit, int8 to the nearest of its steps; each token and head with a scale of its own."""
    s = Sequences(np.random.default_rng(seed), [length], 3, 3, d, block_size, dtype)
    s.k[0] *= size * 10.0 ** np.random.default_rng(seed).integers(-3, 1, (length, 3, 1))
    s.v[0] *= size
    first = length // 2
    for row in ((0, 0, first), (0, first, length - first)):
        if row[2]:
            s.run([row], threads=2)
    for got, x in zip(s.stored(0), (s.k[0], s.v[0]), strict=True):
        if dtype == "int8":
            _, scale = reference.to_int8(x)
            assert (np.abs(got - x) <= scale[..., None] * 0.5001).all()
        else:
            np.testing.assert_array_equal(got, x.astype(np.float16) if dtype == "fp16" else x)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
@pytest.mark.parametrize("window", [0, 70])
def test_batch_invariance_of_attention(dtype, window):
    """One row at a time, in chunks of 7 or 512, among others, at every block size and thread count: the same bits."""
    lengths = [1150, 90, 1]
    want = None
    for block_size in (16, 32, 64):
        for chunk, threads in ((1150, 1), (512, 2), (7, 1), (1, 2)):
            s = Sequences(np.random.default_rng(3), lengths, 6, 2, 48, block_size, dtype)
            out = []
            for at in range(0, lengths[0], chunk):
                rows = [(0, at, min(chunk, lengths[0] - at))]
                if at < lengths[1] and chunk < 512:
                    rows.append((1, at, min(chunk, lengths[1] - at)))
                out.append(s.run(rows, window=window, threads=threads)[0])
            got = np.concatenate(out)
            want = got if want is None else want
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8", "bf16"])
@pytest.mark.parametrize("rows", [[(0, 0, 2)], [(0, 3, 7)], [(0, 1, 1), (1, 0, 5), (2, 5, 1)], [(0, 2, 30), (1, 7, 9)]])
def test_each_thread_writes_the_keys_that_it_rotated(isa, rng, dtype, rows):
    """Whichever is ahead: an executor's threads do not meet between the two."""
    if dtype == "bf16" and isa != select.TILES:
        pytest.skip("for kernels with tile registers")
    kv_heads, d, tokens = 2, 20, sum(n for _, _, n in rows)
    keys, values = (rng.standard_normal((tokens, kv_heads, d)).astype(np.float32) for _ in range(2))
    angles = rng.standard_normal((40, d // 2)).astype(np.float32)
    tables = np.arange(9, dtype=np.int32).reshape(1, 3, 3)

    def stored(order):
        store, view = ops.KVStore(9, kv_heads, d, 16, dtype), BatchView(3, 64, tables)
        for i, first, n in rows:
            view.add_row(i, first, np.zeros(n, np.int32), 1)
        store.rotate_and_write(view, keys.copy(), values, np.cos(angles), np.sin(angles), order)
        return [array for array in (store.arrays.k, store.arrays.v, store.arrays.k_scale) if array is not None]

    alone = stored([0])
    for threads in (2, 3, 4):
        for order in (range(threads), range(threads)[::-1]):
            for got, want in zip(stored(list(order)), alone, strict=True):
                np.testing.assert_array_equal(got, want)


def write_one(dtype, values):
    """The arrays of a store in which `values` are K and V of the only token."""
    store = ops.KVStore(1, 1, len(values), 16, dtype)
    view = BatchView(1, 1, np.zeros((1, 1, 1), np.int32))
    view.add_row(0, 0, np.zeros(1, np.int32), 1)
    values = np.array(values, np.float32).reshape(1, 1, -1)
    store.write(view, values, values)
    return store.arrays


@pytest.mark.parametrize(
    "values",
    [
        [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5, 0.25, -0.0],  # ties, with a scale of 1
        [-254, 1, 3, 5, 253, -253, 2.0000002, 1.9999999],
        [0, 0, -0.0],
        [1e-31, -1e-38, 0],  # too small for a scale
        [3e38, -3.4e38, 1e30, 1],
        [-2e-30, 1.1e-30],
    ],
)
def test_int8_cache_rounds_to_nearest_even(isa, values):
    arrays = write_one("int8", values)
    q, scale = reference.to_int8(np.array(values, np.float32))
    np.testing.assert_array_equal(arrays.k[0, 0, :, 0], q)
    np.testing.assert_array_equal(arrays.v[0, 0, 0, : len(values)], q)
    assert arrays.k_scale[0, 0, 0] == arrays.v_scale[0, 0, 0] == scale
    assert np.isnan(arrays.k_scale[0, 0, 1:]).all()


@pytest.mark.parametrize(("dtype", "bad"), [("fp32", np.nan), ("fp16", np.nan), ("int8", np.nan), ("int8", np.inf)])
@pytest.mark.parametrize("of", ["k", "v"])
def test_what_is_not_finite_reaches_the_output(isa, dtype, bad, of):
    """Of all who see it, in the heads that share it; nobody before, and no other KV head."""
    s = Sequences(np.random.default_rng(4), [150], 6, 2, 20, 16, dtype)
    getattr(s, of)[0][70, 1, 3] = bad
    out = s.run([(0, 0, 150)], threads=2)[0]
    assert np.isnan(out[70:, 3:, 3]).all()
    assert np.isfinite(out[:70]).all()
    assert np.isfinite(out[:, :3]).all()


def test_half_conversion_rounds_to_nearest_even(isa):
    edge = [0, -0.0, 1, 65504, 65519.996, 65520, 1e6, 6e-8, 2.98e-8, 2.99e-8, 1 + 2**-11, 1 + 3 * 2**-11, np.inf]
    values = np.concatenate([np.array(edge), np.random.default_rng(0).standard_normal(51) * 1e-5]).astype(np.float32)
    arrays = write_one("fp16", values)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(arrays.k[0, 0, :, 0].view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(arrays.v[0, 0, 0, : values.size].view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize(("group", "d"), [(3, 64), (1, 32), (2, 48), (4, 80)])
def test_attention_quantises_its_output_as_quantise_does(rng, group, d):
    """Chunks and decode rows that share tiles of eight rows, whoever computes them."""
    s = Sequences(rng, [100, 9, 33], group * 2, 2, d, 32, "fp16")
    s.run([(0, 0, 60), (1, 0, 8), (2, 0, 32)])
    view = BatchView(3, 4096, s.tables)
    for i, first, n in ((0, 60, 40), (1, 8, 1), (2, 32, 1)):
        view.add_row(i, first, np.zeros(n, np.int32), 1)
    q = rng.standard_normal((42, group * 2, d)).astype(np.float32)
    for threads in (1, 2, 3):
        out, parts = s.store.attend(view, q, 0.2, threads=threads, quantised=True)
        for got, want in zip(parts, ops.quantise(out.reshape(42, -1)), strict=True):
            np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="blocks of 32"):
        Sequences(rng, [1], 1, 1, 16, 16).store.attend(view, q[:, :1, :16].copy(), 0.2, quantised=True)
