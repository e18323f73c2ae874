"""Which build runs, what only the debug build checks, and that no native object outlives its engine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miro_cy import Engine, Request, SamplingParams
from miro_cy.batch import BatchView
from miro_cy.errors import ModelError, NonFinite
from miro_cy.native import build_mode, live_objects

GOLDEN = Path(__file__).parent / "data" / "golden"
LLAMA = GOLDEN / "hf" / "llama"
PROMPT = {"tokens": [1, 2, 3] * 20}
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


# --- the build ---------------------------------------------------------------------------------------------------

PREPARE = """
import numpy as np
from miro_cy._kernels import ops
from miro_cy.batch import BatchView

def view(tables, first=0, tokens=2):
    made = BatchView(1, 64, np.array(tables, np.int32).reshape(1, 1, -1))
    made.add_row(0, first, np.arange(tokens, dtype=np.int32), 1)
    return made

kv = ops.KVStore(blocks=4, n_kv_heads=1, head_dim=16, block_size=16)
rows = np.zeros((2, 1, 16), np.float32)
print("ready", flush=True)
"""
#: Each would read or write memory that is not its own. The last part is what the complaint must name.
OUT_OF_RANGE = {
    "a block past the pool": ("kv.write(view([4]), rows, rows)", "kv_cache.pxi"),
    "a block below the pool": ("kv.write(view([-1]), rows, rows)", "kv_cache.pxi"),
    "a position past the table": ("kv.write(view([0, 1], first=31), rows, rows)", "kv_cache.pxi"),
    "a block that is read past the pool": ("kv.attend(view([0, 2**30], first=20), rows, 1.0)", "attention.pxi"),
    "a position that is read past the table": ("kv.attend(view([0, 1], first=40), rows, 1.0)", "attention.pxi"),
}
#: The last one: an index that Cython checks, in a function that cannot raise.
UNRAISABLE = """
empty = BatchView(1, 8, np.zeros((0, 1, 1), np.int32))
empty.add_row(0, 0, np.arange(2, dtype=np.int32), 1)
kv.write(empty, rows, rows)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREPARE + code + "\nprint('survived')"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def debug_only() -> None:
    if build_mode() == "release":
        pytest.skip("a release does not check this: make test-debug ARGS=tests/test_native.py")


def test_the_build_that_was_asked_for() -> None:
    assert build_mode() == os.environ.get("MIRO_TEST_BUILD", build_mode())
    assert build_mode() in ("release", "debug", "sanitized")


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_a_debug_build_ends_at_memory_that_is_not_its_own(case: str) -> None:
    debug_only()
    code, place = OUT_OF_RANGE[case]
    done = run(code)
    assert done.stdout == "ready\n"
    assert done.returncode == -6, done.stderr
    assert place in done.stderr
    assert "check failed" in done.stderr


def test_a_debug_build_ends_at_an_exception_that_nobody_would_see() -> None:
    debug_only()
    done = run(UNRAISABLE)
    assert done.stdout == "ready\n"
    assert done.returncode == -6, done.stderr
    assert "IndexError" in done.stderr
    assert "an exception in a function that cannot raise" in done.stderr


def test_a_sanitized_build_ends_at_memory_that_no_assertion_guards() -> None:
    if build_mode() != "sanitized":
        pytest.skip("nothing watches memory here: make debug-asan ARGS=tests/test_native.py")
    done = run("ops.rope(view([0], first=64), rows, *[np.zeros((64, 8), np.float32)] * 2)")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "rows.pxi" in done.stderr


@pytest.mark.parametrize("row", [-1, 2])
def test_a_debug_build_raises_where_python_can_see_it(row: int) -> None:
    debug_only()
    done = run(
        "from miro_cy import SamplingParams\n"
        "from miro_cy.sampling.sampler import TokenSampler\n"
        f"TokenSampler(SamplingParams()).pick(np.zeros((2, 3), np.float32), {row}, 0)"
    )
    assert done.returncode == 1
    assert "IndexError" in done.stderr


# --- live objects ------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left() -> Iterator[Callable[[], None]]:
    """A check that there are as many native objects as before; made once more at the end of the test."""
    gc.collect()
    before = live_objects()

    def check() -> None:
        gc.collect()
        assert live_objects() == before

    yield check
    check()


def test_a_loaded_engine_is_counted(nothing_left: Callable[[], None]) -> None:
    before = live_objects()
    engine = Engine.load(GOLDEN / "gguf" / "Q4_0.gguf", threads=1)
    grown = {kind: n - before[kind] for kind, n in live_objects().items()}
    weights = list(engine._parts.executor.weights.matrices())
    assert grown["weights"] == len(weights)
    assert grown["weight_bytes"] >= sum(matrix.nbytes for matrix in weights) > 0
    assert grown["kv_bytes"] == engine._parts.executor.kv_bytes > 0
    assert (grown["executors"], grown["block_pools"], grown["block_tables"], grown["sequence_tables"]) == (1, 1, 1, 1)
    assert (grown["sequences"], grown["owned_blocks"]) == (0, 0)
    del weights
    engine.close()
    closed = {kind: n - before[kind] for kind, n in live_objects().items()}
    assert (closed["executors"], closed["weights"], closed["weight_bytes"], closed["kv_bytes"]) == (0, 0, 0, 0)
    del engine


@pytest.mark.parametrize("closed", [True, False])
def test_a_forgotten_engine_that_refers_to_itself_is_gone_with_one_collection(
    nothing_left: Callable[[], None], closed: bool
) -> None:
    engine = Engine.load(LLAMA, threads=1, kv_memory="8MiB")
    engine._parts.core._executor = Holder(engine)  # type: ignore[assignment]
    if closed:
        engine.close()
    del engine
    nothing_left()


class Holder:
    """Something inside an engine that refers to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine


def test_running_sequences_are_counted(nothing_left: Callable[[], None]) -> None:
    with Engine.load(LLAMA, threads=1, kv_memory="8MiB") as engine:
        idle = live_objects()
        ids = [engine.add(Request(PROMPT, LONG)) for _ in range(3)]
        assert live_objects()["sequences"] == idle["sequences"] + 3
        engine.step()
        assert live_objects()["owned_blocks"] > idle["owned_blocks"]
        assert engine.abort(ids[0])
        assert live_objects()["sequences"] == idle["sequences"] + 2
        for request_id in ids[1:]:
            engine.abort(request_id)
        engine.step()
        assert live_objects() == idle
    del engine


class Broken:
    """An executor that computes nothing but NaN."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def forward(self, view: BatchView) -> Any:
        return np.full_like(self._inner.forward(view), np.nan)


def test_requests_of_every_end_leave_nothing(nothing_left: Callable[[], None]) -> None:
    """Finished, cancelled half-way, and failed: in turns, and once more with all that is left at `close`."""
    for path in (LLAMA, GOLDEN / "gguf" / "Q4_1.gguf", LLAMA / "model-f32.gguf"):
        with Engine.load(path, threads=2, kv_memory="8MiB") as engine:
            idle = live_objects()
            engine.generate([PROMPT] * 4, SHORT)
            stream = engine.stream(PROMPT, LONG)
            next(stream)
            stream.close()
            engine.logits([1, 2, 3])
            forward = engine._parts.core._executor
            engine._parts.core._executor = Broken(forward)
            with pytest.raises(NonFinite):
                engine.generate(PROMPT, SHORT)
            engine._parts.core._executor = forward
            engine.generate(PROMPT, SHORT)
            assert live_objects() == idle
            unfinished = engine.stream(PROMPT, LONG)
            next(unfinished)
        del engine, unfinished, stream, forward
        nothing_left()


def test_a_model_that_is_refused_leaves_nothing(nothing_left: Callable[[], None], tmp_path: Path) -> None:
    whole = (GOLDEN / "gguf" / "Q4_0.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    for size in range(1, len(whole), len(whole) // 20):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            Engine.load(path, threads=1)
    nothing_left()
