"""`inspect_model` agrees with what loading the same model takes."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from miro_cy import Engine, EngineConfig
from miro_cy._kernels import select
from miro_cy.errors import ConfigError, ModelFormatError, ModelNotFound, Unavailable, UnsupportedModel
from miro_cy.inspect import LayerGroup, TypeShare, inspect_model
from miro_cy.machine import default_threads
from miro_cy.memory import step_bytes
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.weights import load_weights

GOLDEN = Path(__file__).parent / "data" / "golden"
FILES = [
    "gguf/Q4_0.gguf",
    "gguf/Q4_1.gguf",
    "gguf/Q6_K.gguf",
    "hf/llama",
    "hf/llama-tied-bias",
    "hf/llama3-rope",
    "hf/qwen3",
]
FREE = 2**30


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which always as much memory is free."""
    for module in ("inspect", "loading"):
        monkeypatch.setattr(f"miro_cy.{module}.available_memory", lambda: FREE)


@pytest.fixture(params=[True, False], ids=["tiles", "no-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As if the machine had tile registers, or had none, for tests that load nothing."""
    for module in ("inspect", "loading"):
        monkeypatch.setattr(f"miro_cy.{module}.has_tiles", lambda: request.param)
    given: bool = request.param
    return given


@pytest.mark.parametrize("name", FILES)
def test_memory_is_what_loading_takes(name: str) -> None:
    report = inspect_model(GOLDEN / name)
    with open_checkpoint(GOLDEN / name) as checkpoint:
        weights = load_weights(checkpoint)
        assert report.bytes == sum(tensor.nbytes for tensor in checkpoint.source.tensors.values())
    vectors = [weights.output_norm, *(v for layer in weights.layers for v in layer.vectors.values())]
    taken = weights.nbytes + sum(vector.nbytes for vector in vectors)
    with Engine.load(GOLDEN / name) as engine:
        buffers = step_bytes(engine._parts.spec, engine.config, engine._parts.executor.threads)
        assert f"-{report.kv_dtype}-" in engine.fingerprint
        assert (report.name, report.context) == (engine.name, engine.context)
        assert report.memory[report.kv_dtype].kv == engine._parts.executor.kv_bytes
    assert list(report.memory) == ["fp16", "fp32", "int8", *(["bf16"] if select.has_tiles() else [])]
    for dtype, memory in report.memory.items():
        assert memory.weights == taken
        assert memory.activations == buffers + 4 * engine._parts.spec.rope.dim * report.context
        assert memory.total == taken + memory.activations + memory.kv
        assert memory.kv == memory.kv_full == report.kv_bytes_per_token[dtype] * report.context
    assert sum(share.bytes for share in report.types.values()) == report.bytes
    assert list(report.types.values()) == sorted(report.types.values(), key=lambda share: -share.bytes)


def test_description_of_a_folder(tiles: bool) -> None:
    """A KV cache of bf16 has a place where engines may have one, whatever this model's does by default."""
    report = inspect_model(GOLDEN / "hf" / "llama3-rope", context=100)
    with open_checkpoint(GOLDEN / "hf" / "llama3-rope") as checkpoint:
        buffers = step_bytes(checkpoint.spec, EngineConfig(), default_threads()) + 4 * 16 * 100
    rest = {"weights": 509184, "activations": buffers}
    token = {"fp16": 256, "fp32": 512, "int8": 160} | ({"bf16": 384} if tiles else {})  # keys of 16 fill 32 in pairs
    assert asdict(report) | {"path": "", "rope_theta": 0} == {
        "name": "llama3-rope",
        "path": "",
        "format": "safetensors",
        "architecture": "llama",
        "layers": 2,
        "hidden_size": 64,
        "ffn_size": 160,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_context": 512,
        "rope_theta": 0,
        "rope_scaling": "factors",
        "tied_output": False,
        "tokenizer": "none",
        "tokenizer_supported": False,
        "eos_ids": [2],
        "parameters": 127296,
        "bytes": 509184,
        "types": {"F32": {"tensors": 21, "parameters": 127296, "bytes": 509184}},
        "problem": None,
        "kv_bytes_per_token": token,
        "kv_groups": [{"layers": 2, "window": 0}],
        "context": 100,
        "compute": "exact",
        "kv_dtype": "fp32",
        "memory": {  # whole blocks of 32 tokens
            dtype: rest | {"kv": 128 * size, "kv_full": 128 * size, "total": 509184 + buffers + 128 * size}
            for dtype, size in token.items()
        },
        "available": FREE,
        "capacity": {
            dtype: {"worker": 4 * 512, "engine": 512, "worker_sequences": 16, "engine_sequences": 4} for dtype in token
        },
        "fit": {},
    }


@pytest.mark.parametrize("name", ["gguf/Q4_1.gguf", "hf/llama"])
@pytest.mark.parametrize("blocks", [0, 1, 7, 1000])
def test_capacity_is_that_of_an_engine_and_of_a_worker(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """blocks: for which there is room beside weights and buffers. Each KV dtype with arithmetic that takes it."""
    full, modes = inspect_model(GOLDEN / name), {"fp16": "fast", "fp32": "exact", "int8": "fast", "bf16": "bf16"}
    for dtype, memory in full.memory.items():
        beside = memory.weights + memory.activations
        free = beside + blocks * 32 * full.kv_bytes_per_token[dtype]
        for module in ("inspect", "loading"):
            monkeypatch.setattr(f"miro_cy.{module}.available_memory", lambda free=free: free)
        capacity = inspect_model(GOLDEN / name).capacity[dtype]
        settings = {"kv_dtype": dtype, "compute": modes[dtype], "threads": default_threads()}
        for tokens, kv_memory in ((capacity.engine, None), (capacity.worker, "auto")):
            if blocks == 0 and not tokens:
                with pytest.raises(Unavailable):
                    Engine.load(GOLDEN / name, kv_memory=kv_memory, **settings)
                continue
            with Engine.load(GOLDEN / name, kv_memory=kv_memory, **settings) as engine:
                assert engine.describe()["capacity"] == tokens > 0


def test_what_fits(tiles: bool) -> None:
    """As many tokens as have room beside everything else, and not a block more."""
    path = GOLDEN / "gguf" / "Q4_1.gguf"
    report = inspect_model(path, fit="24GiB")
    assert list(report.fit) == list(report.kv_bytes_per_token) == ["fp16", "fp32", "int8", *(["bf16"] if tiles else [])]
    for dtype, fit in report.fit.items():
        block = 32 * report.kv_bytes_per_token[dtype]
        assert fit.total == 24 * 2**30 == fit.weights + fit.activations + fit.left
        assert (fit.weights, fit.activations) == (report.memory[dtype].weights, report.memory[dtype].activations)
        assert fit.tokens == fit.left // block * 32
        assert fit.context == report.max_context
    least = inspect_model(path, context=64).memory["int8"]
    size = least.weights + least.activations + 32 * report.kv_bytes_per_token["int8"]
    tight = inspect_model(path, fit=size).fit
    assert {dtype: fit.tokens for dtype, fit in tight.items()} == dict.fromkeys(report.fit, 0) | {"int8": 32}
    assert tight["int8"].context == 32 < report.max_context
    with pytest.raises(ConfigError, match=r"fit is too small: of 1,000,000 bytes the weights take .* which leaves -"):
        inspect_model(path, fit="1MB")


def test_what_fits_of_sequences_of_a_context(tiles: bool) -> None:
    """--context is the longest that a sequence may become: what longer ones would need is left for others."""
    path = GOLDEN / "gguf" / "Q4_1.gguf"
    whole, short = inspect_model(path, fit="1GiB"), inspect_model(path, context=100, fit="1GiB")
    for dtype, fit in short.fit.items():
        assert (fit.weights, fit.activations) == (short.memory[dtype].weights, short.memory[dtype].activations)
        assert fit.left > whole.fit[dtype].left, "shorter rotary tables"
        assert (fit.context, fit.sequences) == (100, fit.tokens // 128), "each takes four blocks of 32"
        assert whole.fit[dtype].sequences == whole.fit[dtype].tokens // whole.max_context
    engines = [whole.max_context] * (4 if tiles else 3)
    assert [short.capacity[dtype].engine for dtype in short.fit] == engines, "default settings"


@pytest.mark.parametrize(("context", "blocks"), [(512, 2), (64, 2), (33, 2), (32, 1)])
def test_what_windows_save(context: int, blocks: int) -> None:
    """Two layers that see 24 tokens, which are in two blocks of 32 at most."""
    path = GOLDEN / "hf" / "mistral-swa"
    report = inspect_model(path, context, fit="1GiB")
    assert report.kv_groups == [LayerGroup(layers=2, window=24)]
    for dtype, memory in report.memory.items():
        block = 32 * report.kv_bytes_per_token[dtype]
        assert (memory.kv, memory.kv_full) == (blocks * block, -(-context // 32) * block)
        assert memory.total == memory.weights + memory.activations + memory.kv
        fit, capacity = report.fit[dtype], report.capacity[dtype]
        assert (fit.context, fit.sequences) == (context, fit.tokens // (32 * blocks))
        assert (capacity.worker, capacity.engine) == (4 * 512, 512)
        assert (capacity.worker_sequences, capacity.engine_sequences) == (64 // blocks, 16 // blocks)
    with Engine.load(path, kv_memory=report.memory["fp32"].kv) as engine:
        assert engine.describe()["context"] == (512 if blocks == 2 else 32), "one of them is served in that memory"


def test_types_that_cannot_be_packed_are_reported(reference_data: Path) -> None:
    report = inspect_model(reference_data / "gguf" / "Q5_0.gguf", fit="24GiB")
    assert report.problem is not None
    assert "has type Q5_0" in report.problem
    assert report.memory == report.capacity == report.fit == {}
    assert isinstance(report.types["Q5_0"], TypeShare)


def test_what_is_refused(tmp_path: Path) -> None:
    for size in ("", "24 potatoes", 0, -1, True, 1.5, "1e9GiB", 2**60, "1"):
        with pytest.raises(ConfigError, match=r"^fit ") as caught:
            inspect_model(GOLDEN / "hf" / "llama", fit=size)  # type: ignore[arg-type]
        assert caught.value.field == "fit"
    for context in (0, -1, 513):
        with pytest.raises(ConfigError) as caught:
            inspect_model(GOLDEN / "hf" / "llama", context)
        assert caught.value.field == "context"
    with pytest.raises(ModelNotFound):
        inspect_model(tmp_path / "absent")
    with pytest.raises(ModelFormatError, match="folder"):
        inspect_model(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "hf" / "llama", folder)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"llama"', '"mamba"'))
    with pytest.raises(UnsupportedModel, match="mamba"):
        inspect_model(folder)
