"""Sequences in a paged KV cache, for the tests of attention (loaded with runpy)."""

import numpy as np

from miro_cy._kernels import ops
from miro_cy.batch import BatchView

#: Where a table names no block: whoever reads that ends the process.
GONE = -(2**30)


class Sequences:
    """Sequences of given lengths in one paged store, blocks dealt out at random."""

    def __init__(self, rng, lengths, heads, kv_heads, d, block_size, dtype="fp32"):
        blocks = [-(-n // block_size) for n in lengths]
        self.tables = np.full((1, len(lengths), max(blocks) + 4), GONE, np.int32)
        deal = iter(np.random.default_rng(block_size).permutation(sum(blocks) + 3))
        for i, count in enumerate(blocks):
            self.tables[0, i, :count] = [next(deal) for _ in range(count)]
        self.block_size, self.dtype = block_size, dtype
        self.store = ops.KVStore(sum(blocks) + 3, kv_heads, d, block_size, dtype)
        self.q = [rng.standard_normal((n, heads, d)).astype(np.float32) for n in lengths]
        self.k = [rng.standard_normal((n, kv_heads, d)).astype(np.float32) for n in lengths]
        self.v = [rng.standard_normal((n, kv_heads, d)).astype(np.float32) for n in lengths]

    def stored(self, i):
        """K and V of sequence i, float32 [tokens, kv_heads, d], as the store has them."""
        arrays, (n, kv_heads, d) = self.store.arrays, self.k[i].shape
        blocks = self.tables[0, i, : -(-n // self.block_size)]
        if self.dtype == "bf16":
            k = (arrays.k[blocks].astype(np.uint32) << 16).view(np.float32)  # [.., 32s of d, 16s of tokens, 16, 16, 2]
            v = (arrays.v[blocks].astype(np.uint32) << 16).view(np.float32)  # [.., 16s of d, pairs, 16, 2]
            k = k.transpose(0, 3, 5, 1, 2, 4, 6).reshape(-1, kv_heads, k.shape[2] * 32)
            v = v.transpose(0, 3, 5, 1, 2, 4).reshape(-1, kv_heads, v.shape[2] * 16)
            assert not k[:n, :, d:].any()
            return k[:n, :, :d], v[:n, :, :d]
        k = arrays.k[blocks].transpose(0, 3, 1, 2).astype(np.float32)
        v = arrays.v[blocks].transpose(0, 2, 1, 3)[..., :d].astype(np.float32)
        if arrays.k_scale is not None:
            k *= arrays.k_scale[blocks].transpose(0, 2, 1)[..., None]
            v *= arrays.v_scale[blocks].transpose(0, 2, 1)[..., None]
        return k.reshape(-1, kv_heads, d)[:n], v.reshape(-1, kv_heads, d)[:n]

    def run(self, rows, scale=0.2, soft_cap=0.0, window=0, threads=1):
        """rows: [(sequence, first, count)], written and attended in one call -> outputs, one a row.

        The call knows no blocks that a window has left.
        """
        tables = self.tables.copy()
        for i, first, _ in rows if window else ():
            tables[0, i, : max(0, first - window + 1) // self.block_size] = GONE
        view = BatchView(len(rows), 4096, tables)
        for i, first, n in rows:
            view.add_row(i, first, np.zeros(n, np.int32), 1)
        part = [np.concatenate([x[i][first : first + n] for i, first, n in rows]) for x in (self.q, self.k, self.v)]
        self.store.write(view, part[1], part[2], threads)
        out = self.store.attend(view, part[0], scale, soft_cap, window, threads)
        return np.split(out, np.cumsum([n for _, _, n in rows])[:-1])
