"""Loading in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from miro_cy import Engine
from miro_cy.errors import InternalError
from miro_cy.native import live_objects
from miro_cy.tools.load import resident_bytes, time_load

Golden = Callable[[str], Path]
pytestmark = pytest.mark.timeout(60)


def test_a_load_leaves_nothing_in_this_process(golden: Golden) -> None:
    before = live_objects()
    sample = time_load(str(golden("gguf/Q4_1.gguf")), {"threads": 1})
    assert live_objects() == before
    assert 0 < sample.seconds < sample.process_seconds
    assert sample.memory_bytes > 0


def test_the_pool_is_told_apart_and_the_settings_are_used(golden: Golden) -> None:
    model = golden("gguf/Q4_1.gguf")
    before = live_objects()["kv_bytes"]  # of whatever else still lives in this process
    with Engine.load(model, threads=1, max_context=64, kv_dtype="fp32") as engine:
        pool = live_objects()["kv_bytes"] - before
        assert engine.context == 64
    settings = {"threads": 1, "max_context": 64, "kv_dtype": "fp32"}
    assert time_load(str(model), settings, first_token=True).pool_bytes == pool


def test_a_pool_of_hundreds_of_megabytes_is_not_resident(smollm2_path: Path) -> None:
    sample = time_load(str(smollm2_path), {"threads": 1})
    assert sample.pool_bytes > 150 << 20
    assert smollm2_path.stat().st_size * 0.5 < sample.memory_bytes < sample.pool_bytes


def test_what_goes_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"the process that loads the model failed: .*no model file") as error:
        time_load(str(tmp_path / "missing.gguf"), {})
    assert "\n" not in error.value.message


def test_modules_are_found_where_this_process_finds_them(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the working folder, and wherever that is."""
    (tmp_path / "miro_cy.py").write_text("raise SystemExit('the wrong one')")
    model = golden("hf/llama").absolute()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert time_load(str(model), {"threads": 1}).seconds > 0


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident_bytes()
    block = bytearray(os.urandom(1 << 20) * 64)
    assert resident_bytes() - before > 32 << 20
    assert len(block) == 64 << 20
