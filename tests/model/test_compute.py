"""Which arithmetic an engine computes in: what it is asked for, what it does by default, what a machine must have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from miro_cy import Engine, EngineConfig, loading
from miro_cy._kernels import select
from miro_cy.config import Compute, KVDtype
from miro_cy.errors import ConfigError
from miro_cy.loading import compute_mode, kv_dtype_of

Golden = Callable[[str], Path]
NEEDS_TILES = pytest.mark.skipif(not select.has_tiles(), reason="no tile registers (Intel AMX) here for compute bf16")


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As if the machine had tile registers, or had none."""
    monkeypatch.setattr(loading, "has_tiles", lambda: request.param)
    given: bool = request.param
    return given


@pytest.mark.parametrize("tiles", [True, False], indirect=True)
@pytest.mark.parametrize(("at_once", "many"), [(1, False), (4, False), (5, True), (64, True)])
def test_quantised_weights_meet_bfloat16_for_many_sequences_in_tiles(tiles: bool, at_once: int, many: bool) -> None:
    config = EngineConfig(max_num_seqs=at_once)
    assert compute_mode(config, quantised=True) == ("bf16" if tiles and many else "fast")
    assert compute_mode(config, quantised=False) == "exact"
    assert kv_dtype_of(config, compute_mode(config, quantised=True)) == ("bf16" if tiles and many else "fp16")
    assert kv_dtype_of(config, compute_mode(config, quantised=False)) == "fp32"


@pytest.mark.parametrize("tiles", [True, False], indirect=True)
@pytest.mark.parametrize("asked", ["fast", "exact"])
@pytest.mark.parametrize("quantised", [True, False])
def test_what_is_asked_for_is_done(tiles: bool, asked: Compute, quantised: bool) -> None:
    for at_once in (1, 64):
        config = EngineConfig(compute=asked, max_num_seqs=at_once)
        assert compute_mode(config, quantised=quantised) == asked


@pytest.mark.parametrize("tiles", [True], indirect=True)
def test_tiles_may_be_asked_for_by_few(tiles: bool) -> None:
    for at_once in (1, 64):
        for quantised in (True, False):
            config = EngineConfig(compute="bf16", max_num_seqs=at_once)
            assert compute_mode(config, quantised=quantised) == "bf16"
            assert kv_dtype_of(config, "bf16") == "bf16"
            for asked in get_args(KVDtype):
                assert kv_dtype_of(replace(config, kv_dtype=asked), "bf16") == asked


@pytest.mark.parametrize("tiles", [False], indirect=True)
@pytest.mark.parametrize("name", ["gguf/Q4_1.gguf", "hf/llama"])
def test_tiles_that_are_not_there_are_refused_by_name(tiles: bool, golden_file: Golden, name: str) -> None:
    path = golden_file(name if name.endswith(".gguf") else f"{name}/model.safetensors")
    for at_once in (1, 64):
        with pytest.raises(ConfigError, match="tile registers") as caught:
            Engine.load(path if path.suffix == ".gguf" else path.parent, compute="bf16", max_num_seqs=at_once)
        assert caught.value.field == "compute"


@pytest.mark.parametrize("tiles", [True, False], indirect=True)
def test_a_kv_cache_of_bf16_is_refused_where_compute_is_another(tiles: bool, golden_file: Golden) -> None:
    """By default it is for few sequences, for a file of floats, and where there are no tile registers."""
    quantised, floats = golden_file("gguf/Q4_1.gguf"), golden_file("hf/llama/model-f32.gguf")
    fast, exact = "goes with compute 'bf16', in tile .* not with 'fast'", "'exact' keeps the KV cache in fp32"
    cases = [(quantised, 1, fast), (quantised, 4, fast), (floats, 1, exact), (floats, 64, exact)]
    cases += [] if tiles else [(quantised, 5, fast), (quantised, 64, fast)]
    for path, at_once, text in cases:
        with pytest.raises(ConfigError, match=text) as caught:
            Engine.load(path, kv_dtype="bf16", max_num_seqs=at_once)
        assert caught.value.field == "kv_dtype"
    if not tiles:
        with pytest.raises(ConfigError, match="compute 'bf16' needs tile registers") as caught:
            Engine.load(quantised, compute="bf16", kv_dtype="bf16")
        assert caught.value.field == "compute"


@NEEDS_TILES
@pytest.mark.parametrize("settings", [{"max_num_seqs": 5}, {"compute": "bf16", "max_num_seqs": 1}], ids=str)
def test_a_kv_cache_of_bf16_may_be_asked_for(settings: dict[str, Any], golden_file: Golden) -> None:
    with Engine.load(golden_file("gguf/Q4_1.gguf"), kv_dtype="bf16", threads=1, **settings) as engine:
        assert f"-bf16-bf16-{select.TILES}-" in engine.fingerprint


def test_the_fingerprint_and_the_description_say_it(quantised_mode: Compute, golden_file: Golden) -> None:
    isa = select.TILES if quantised_mode == "bf16" else select.active_isa()
    with Engine.load(golden_file("gguf/Q4_1.gguf"), compute=quantised_mode, threads=1) as engine:
        dtype = "bf16" if quantised_mode == "bf16" else "fp16"
        assert f"-{quantised_mode}-{dtype}-{isa}-" in engine.fingerprint
        told = engine.describe()
        assert (told["compute"], told["isa"], told["fingerprint"]) == (quantised_mode, isa, engine.fingerprint)
        assert told["kv_dtype"] == dtype


def test_the_default_loads_as_it_says(golden_file: Golden) -> None:
    few, many = ("fast", "fp16"), ("bf16", "bf16") if select.has_tiles() else ("fast", "fp16")
    for at_once, (mode, dtype) in ((4, few), (5, many)):
        with Engine.load(golden_file("gguf/Q4_0.gguf"), threads=1, max_num_seqs=at_once) as engine:
            assert f"-{mode}-{dtype}-" in engine.fingerprint


@NEEDS_TILES
def test_engines_of_all_modes_beside_each_other(golden_file: Golden) -> None:
    """Each keeps the build it was made with: the others, and what is in use meanwhile, change no bit."""
    golden = np.load(golden_file("gguf/Q4_1.npz"))
    path, modes = golden_file("gguf/Q4_1.gguf"), ("fast", "bf16", "exact")
    before = select.active_isa()
    alone = {}
    for mode in modes:
        with Engine.load(path, compute=mode, threads=1) as engine:
            alone[mode] = engine.logits(golden["ids"])
    errors = {mode: np.abs(alone[mode] - golden["logits"]).mean() for mode in modes}
    assert errors["exact"] < errors["bf16"] < errors["fast"]
    engines = {mode: Engine.load(path, compute=mode, threads=2, kv_memory="8MiB") for mode in modes}
    try:
        for isa in (before, "generic"):
            select.use(isa)
            for mode, engine in engines.items():
                np.testing.assert_array_equal(engine.logits(golden["ids"]), alone[mode])
    finally:
        select.use(before)
        for engine in engines.values():
            engine.close()


@NEEDS_TILES
def test_float_weights_in_tiles_stay_near(golden_file: Golden) -> None:
    """Their products are exact; what is lost is lost in the KV cache, and in attention where that is of bfloat16."""
    golden = np.load(golden_file("hf/llama/golden.npz"))
    for kv_dtype, limit in ((None, 2e-2), ("fp16", 2e-3), ("fp32", 1e-5)):
        path = golden_file("hf/llama/model-f32.gguf")
        with Engine.load(path, compute="bf16", kv_dtype=kv_dtype, threads=2) as engine:
            assert f"-bf16-{kv_dtype or 'bf16'}-" in engine.fingerprint
            logits = engine.logits(golden["ids"])
        assert np.abs(logits - golden["logits"]).max() <= limit * np.ptp(golden["logits"])


@NEEDS_TILES
@pytest.mark.parametrize(("kv_dtype", "limit"), [("fp32", 1e-6), ("fp16", 3e-4), ("bf16", 3e-3), ("int8", 8e-3)])
@pytest.mark.parametrize("name", ["llama-tied-bias", "llama-mha-headdim", "llama-odd", "llama3-rope", "qwen3"])
def test_every_kv_cache_in_tiles_stays_near(golden_file: Golden, name: str, kv_dtype: KVDtype, limit: float) -> None:
    """In the mean, with biases of the values too, and heads that do not fill the tiles."""
    golden = np.load(golden_file(f"hf/{name}/golden.npz"))
    path = golden_file(f"hf/{name}/model-f32.gguf")
    with Engine.load(path, compute="bf16", kv_dtype=kv_dtype, threads=2) as engine:
        logits = engine.logits(golden["ids"])
    assert np.abs(logits - golden["logits"]).mean() <= limit * np.ptp(golden["logits"])


def test_a_lesser_level_has_no_tiles() -> None:
    before = select.active_isa()
    try:
        for isa in select.available():
            select.use(isa)
            best = isa in select.available()[:2] and select.TILES in select.available()
            assert select.has_tiles() == best
            assert select.rounds_to() == ("bfloat16" if isa == select.TILES else "int8")
    finally:
        select.use(before)


def run_with(isa: str, code: str) -> Any:
    environment = os.environ | {"MIRO_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_the_variable_names_a_level_that_works_for_all() -> None:
    tell = "from miro_cy._kernels import select as s; print(s.active_isa(), s.has_tiles())"
    assert run_with("generic", tell).stdout == "generic False\n"
    best = next(name for name in select.available() if name != select.TILES)
    assert run_with("", tell).stdout == run_with(best, tell).stdout == f"{best} {select.TILES in select.available()}\n"
    for wrong in (select.TILES, "v9"):
        done = run_with(wrong, tell)
        assert done.returncode != 0
        assert f"MIRO_ISA={wrong}: not one of {best}" in done.stderr
