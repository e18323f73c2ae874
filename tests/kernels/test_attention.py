"""Flash attention over paged blocks: against materialised attention, and invariant to how rows are batched."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import ops, reference
from miro_cy.batch import BatchView


class Sequences:
    """Sequences of given lengths in one paged store, blocks dealt out at random."""

    def __init__(self, rng, lengths, heads, kv_heads, d, block_size, dtype="fp32"):
        blocks = [-(-n // block_size) for n in lengths]
        self.tables = np.full((1, len(lengths), max(blocks) + 1), -1, np.int32)
        deal = iter(np.random.default_rng(block_size).permutation(sum(blocks) + 3))
        for i, count in enumerate(blocks):
            self.tables[0, i, :count] = [next(deal) for _ in range(count)]
        self.store = ops.KVStore(sum(blocks) + 3, kv_heads, d, block_size, dtype)
        self.q = [rng.standard_normal((n, heads, d)).astype(np.float32) for n in lengths]
        self.k = [rng.standard_normal((n, kv_heads, d)).astype(np.float32) for n in lengths]
        self.v = [rng.standard_normal((n, kv_heads, d)).astype(np.float32) for n in lengths]

    def run(self, rows, scale=0.2, soft_cap=0.0, window=0, threads=1):
        """rows: [(sequence, first, count)], written and attended in one call -> outputs, one a row."""
        view = BatchView(len(rows), 4096, self.tables)
        for i, first, n in rows:
            view.add_row(i, first, np.zeros(n, np.int32), 1)
        part = [np.concatenate([x[i][first : first + n] for i, first, n in rows]) for x in (self.q, self.k, self.v)]
        self.store.write(view, part[1], part[2], threads)
        out = self.store.attend(view, part[0], scale, soft_cap, window, threads)
        return np.split(out, np.cumsum([n for _, _, n in rows])[:-1])


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    d=st.sampled_from([4, 16, 20, 64, 80]),
    block_size=st.sampled_from([16, 32, 64]),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    soft_cap=st.sampled_from([0.0, 5.0]),
    window=st.sampled_from([0, 1, 50, 100]),
)
def test_attention_equals_reference(isa, seed, group, kv_heads, d, block_size, lengths, soft_cap, window):
    rng = np.random.default_rng(seed)
    s = Sequences(rng, lengths, group * kv_heads, kv_heads, d, block_size)
    split = [int(rng.integers(0, n)) for n in lengths]
    first = [(i, 0, n) for i, n in enumerate(split) if n]
    if first:
        s.run(first, window=window, soft_cap=soft_cap, threads=2)
    rest = [(i, at, n - at) for i, (at, n) in enumerate(zip(split, lengths, strict=True))]
    for (i, at, _), got in zip(rest, s.run(rest, window=window, soft_cap=soft_cap, threads=2), strict=True):
        want = reference.attention(s.q[i][at:], s.k[i], s.v[i], at, 0.2, soft_cap, window)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
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


def test_fp16_cache_is_read_as_stored(isa):
    rng = np.random.default_rng(1)
    s = Sequences(rng, [130], 4, 2, 64, 32, "fp16")
    got = s.run([(0, 0, 130)])[0]
    k, v = (x[0].astype(np.float16).astype(np.float32) for x in (s.k, s.v))
    np.testing.assert_allclose(got, reference.attention(s.q[0], k, v, 0, 0.2), rtol=2e-5, atol=2e-5)


def test_half_conversion_rounds_to_nearest_even(isa):
    edge = [0, -0.0, 1, 65504, 65519.996, 65520, 1e6, 6e-8, 2.98e-8, 2.99e-8, 1 + 2**-11, 1 + 3 * 2**-11, np.inf]
    values = np.concatenate([np.array(edge), np.random.default_rng(0).standard_normal(51) * 1e-5]).astype(np.float32)
    store = ops.KVStore(1, 1, values.size, 16, "fp16")
    view = BatchView(1, 1, np.zeros((1, 1, 1), np.int32))
    view.add_row(0, 0, np.zeros(1, np.int32), 1)
    store.write(view, values.reshape(1, 1, -1), values.reshape(1, 1, -1))
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(store.k[0, 0, :, 0].view(np.uint16), want.view(np.uint16))
    np.testing.assert_array_equal(store.v[0, 0, 0, : values.size].view(np.uint16), want.view(np.uint16))


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
