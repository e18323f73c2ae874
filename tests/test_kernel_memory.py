"""Arrays for the kernels begin with a cache line, and so does what a model's step works on."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from miro_cy._kernels import memory, ops
from miro_cy._kernels.kv import KVLayer
from miro_cy._kernels.weights import buffer_nbytes
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


def test_an_arena_holds_what_it_was_made_for_and_no_more():
    sizes = [1, 64, 65, 100_000, 3 << 20]
    arena = memory.Arena(sum(-(-n // memory.LINE) * memory.LINE for n in sizes))
    arrays = [arena.zeros(n, np.uint8) for n in sizes]
    for value, array in enumerate(arrays, 1):
        assert array.ctypes.data % memory.LINE == 0
        assert not array.any()
        array[:] = value
    for value, (array, n) in enumerate(zip(arrays, sizes, strict=True), 1):  # none overlaps another
        assert array.shape == (n,)
        assert (array == value).all()
    assert arrays[0].ctypes.data % memory.LARGE_PAGE == 0
    with pytest.raises(ValueError, match="no room for 1 bytes in the 0"):
        arena.zeros(1, np.uint8)
    kept = arrays[3]
    del arena, arrays, array
    assert (kept == 4).all()  # lives as long as one of its arrays does


def test_weights_lie_in_one_arena_and_give_it_back():
    with open_checkpoint(LLAMA) as checkpoint:
        weights = load_weights(checkpoint)
    matrices = list(weights.matrices())
    assert sum(buffer_nbytes(m.kind, *m.shape) for m in matrices) >= sum(m.nbytes for m in matrices)

    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    with open_checkpoint(LLAMA) as checkpoint:
        again = load_weights(checkpoint)
        before = mapped()
        del again
        assert mapped() <= before - memory.LARGE_PAGE


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
def test_the_cache_begins_with_a_line(dtype):
    sizes = (3, 2, 24, 16, dtype)
    exact = KVLayer(*sizes, memory.Arena(KVLayer.room(*sizes)))
    for kv in (ops.KVStore(*sizes).arrays, exact):
        check_lines(kv)


def check_lines(kv):
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
