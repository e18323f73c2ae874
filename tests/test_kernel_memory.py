"""Arrays for the kernels begin with a cache line, and so does what a model's step works on."""

from pathlib import Path

import numpy as np
import pytest

from miro_cy._kernels import memory, ops
from miro_cy.batch import BatchView
from miro_cy.model.executor import CpuExecutor
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.rope import RopeTables
from miro_cy.model.weights import load_weights

LLAMA = Path(__file__).parent / "data" / "golden" / "hf" / "llama"
SHAPES = [1, 7, 1000, 10**6, (3, 5), (2, 3, 64)]


@pytest.mark.parametrize("make", [memory.zeros, memory.empty])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_begin_with_a_line(make, dtype, shape):
    keep = [make(shape, dtype) for _ in range(3)]
    for array in keep:
        assert array.ctypes.data % memory.LINE == 0
        assert array.shape == np.empty(shape).shape
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_zeros(shape):
    assert not memory.zeros(shape, np.float32).any()


def test_aligned_copies_only_what_is_not():
    fine = memory.zeros(100, np.float32)
    assert memory.aligned(fine) is fine
    odd = np.arange(101, dtype=np.float32)[1:]
    odd = odd if odd.ctypes.data % memory.LINE else np.arange(102, dtype=np.float32)[2:]
    for array in (odd, np.arange(200, dtype=np.float32)[::2]):
        copy = memory.aligned(array)
        assert copy.ctypes.data % memory.LINE == 0
        np.testing.assert_array_equal(copy, array)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
def test_the_cache_begins_with_a_line(dtype):
    store = ops.KVStore(3, 2, 24, 16, dtype)
    kv = store.arrays
    for array in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        assert array is None or array.ctypes.data % memory.LINE == 0


def test_what_a_step_works_on_begins_with_a_line():
    with open_checkpoint(LLAMA) as checkpoint:
        weights = load_weights(checkpoint)
        tables = RopeTables(checkpoint.spec.rope, 64)
    executor = CpuExecutor(
        checkpoint.spec,
        weights,
        n_blocks=4,
        block_size=16,
        kv_dtype="fp32",
        fast=False,
        threads=1,
        max_tokens=8,
        context=64,
    )
    view = BatchView(1, 8, np.zeros((1, 1, 1), np.int32))
    view.add_row(0, 0, np.arange(3, dtype=np.int32), 1)
    logits = executor.forward(view)
    vectors = [weights.output_norm, *(v for layer in weights.layers for v in layer.vectors.values())]
    for array in (tables.cos, tables.sin, logits, *vectors):
        assert array.ctypes.data % memory.LINE == 0
