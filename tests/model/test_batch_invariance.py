"""A sequence's logits have the same bits whatever shares its batch, however it is cut, stored and spread over threads.

The reference is the sequence alone, whole, by one thread, in blocks of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy._kernels import select

F32 = NDArray[np.float32]
LENGTH = 75
#: file, whether it is multiplied in integers, KV dtype
CASES = [
    ("gguf/Q4_0.gguf", True, "fp16"),
    ("gguf/Q4_0.gguf", True, "int8"),
    ("gguf/Q4_1.gguf", True, "fp32"),
    ("gguf/Q4_1.gguf", False, "fp32"),
    ("gguf/Q6_K.gguf", True, "fp16"),
    ("gguf/Q6_K.gguf", False, "fp16"),
    ("gguf/BF16.gguf", False, "fp32"),
    ("hf/llama3-rope/model-f32.gguf", False, "fp16"),
    ("hf/llama-odd/model-f32.gguf", False, "fp16"),
    ("hf/llama-odd/model-f32.gguf", False, "fp32"),
    ("hf/llama-odd/model-f32.gguf", False, "int8"),
    ("hf/llama-tied-bias/model-f32.gguf", False, "fp32"),
    ("hf/llama-tied-bias/model-f32.gguf", False, "int8"),
    ("hf/llama-mha-headdim/model-f32.gguf", False, "fp16"),
    ("hf/qwen3/model-f32.gguf", False, "fp32"),
    ("hf/qwen3/model-f32.gguf", False, "int8"),
    ("gguf/Q4_1.gguf", True, "bf16"),
    ("hf/llama-odd/model-f32.gguf", True, "bf16"),
    ("hf/llama-tied-bias/model-f32.gguf", True, "bf16"),
]

Loader = Callable[[str], Callable[..., Any]]


@pytest.fixture(autouse=True)
def _where_it_exists(request: pytest.FixtureRequest) -> None:
    """A KV cache of bf16 is for the build with tile registers."""
    arguments = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if arguments.get("kv_dtype") == "bf16" and arguments["isa"] != select.TILES:
        pytest.skip("a KV cache of bf16 is for the build with tile registers")


def some_tokens(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 320, length, dtype=np.int32)


def assert_same_bits(got: F32, want: F32) -> None:
    assert got.shape == want.shape
    assert np.isfinite(want).all()
    different = np.flatnonzero((got.view(np.uint32) != want.view(np.uint32)).any(axis=1))
    assert not len(different), f"rows {different[:10]} of {len(want)} differ by up to {np.abs(got - want).max()}"


@pytest.mark.parametrize(("name", "fast", "kv_dtype"), CASES)
def test_chunks_threads_and_block_sizes(isa: str, load_runner: Loader, name: str, fast: bool, kv_dtype: str) -> None:
    make = load_runner(name)
    tokens = some_tokens(1, LENGTH)
    want = make(fast=fast, kv_dtype=kv_dtype, threads=1, block_size=16).score(tokens, LENGTH)
    for threads, block_size in ((1, 32), (1, 64), (2, 16)):
        runner = make(fast=fast, kv_dtype=kv_dtype, threads=threads, block_size=block_size)
        for slot, chunk in enumerate((1, 7, LENGTH)):
            assert_same_bits(runner.score(tokens, chunk, slot), want)


@pytest.mark.parametrize(("name", "fast", "kv_dtype"), CASES)
def test_several_sequences_in_one_view(isa: str, load_runner: Loader, name: str, fast: bool, kv_dtype: str) -> None:
    """Sequences that begin at different times, in chunks of different sizes, some rows with logits and some without."""
    make = load_runner(name)
    lengths, chunks, starts = (LENGTH, 40, 61, 17, 1, 70), (3, 40, 9, 1, 1, 24), (0, 2, 0, 5, 1, 3)
    sequences = [some_tokens(i, length) for i, length in enumerate(lengths)]
    alone = make(fast=fast, kv_dtype=kv_dtype, threads=1, block_size=16)
    want = [alone.score(tokens, len(tokens)) for tokens in sequences]
    runner = make(fast=fast, kv_dtype=kv_dtype, threads=2, block_size=32)
    done = [0] * len(sequences)
    for step in range(LENGTH // 3):
        rows, checks = [], []
        for i in reversed(range(len(sequences))):
            part = sequences[i][done[i] : done[i] + chunks[i]]
            if step < starts[i] or not len(part):
                continue
            n_log = (0, 1, len(part), len(part) // 2)[(step + i) % 4]
            rows.append((i, done[i], part, n_log))
            done[i] += len(part)
            checks.append(want[i][done[i] - n_log : done[i]])
        for got, expected in zip(runner.step(rows), checks, strict=True):
            assert_same_bits(got, expected)
    assert done == list(lengths)


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32", "int8", "bf16"])
def test_past_the_ranges_attention_is_split_into(isa: str, load_runner: Loader, kv_dtype: str) -> None:
    """Longer than two of the ranges (512 tokens) whose partial results attention merges."""
    make = load_runner("hf/llama/model-f32.gguf")
    length = 1100
    tokens = some_tokens(5, length)
    settings: dict[str, Any] = {"fast": False, "kv_dtype": kv_dtype, "slots": 2, "context": length}
    want = make(threads=1, block_size=16, **settings).score(tokens, length)
    assert_same_bits(make(threads=1, block_size=64, **settings).score(tokens, 3), want)
    assert_same_bits(make(threads=2, block_size=32, **settings).score(tokens, 130), want)


def test_the_reference_itself_is_right(golden_file: Callable[[str], Path], load_runner: Loader) -> None:
    golden = np.load(golden_file("gguf/Q4_1.npz"))
    ids = golden["ids"].astype(np.int32)
    logits = load_runner("gguf/Q4_1.gguf")(fast=False, kv_dtype="fp32", block_size=16).score(ids, len(ids))
    assert np.abs(logits - golden["logits"]).max() <= 2e-3 * np.ptp(golden["logits"])


def test_a_step_outside_its_limits_is_refused(load_runner: Loader) -> None:
    runner = load_runner("hf/llama/model-f32.gguf")(fast=False, kv_dtype="fp32", slots=1, context=64)
    with pytest.raises(ValueError, match="1 to 64 tokens"):
        runner.step([])
    with pytest.raises(ValueError, match="past the context"):
        runner.step([(0, 60, some_tokens(1, 5), 1)])
    for token in (-1, 320, 2**31 - 1):
        with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary"):
            runner.step([(0, 0, np.array([token], np.int32), 1)])
