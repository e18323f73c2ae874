"""Hugging Face folders: the same bits as the same model's GGUF file, and every disagreement named."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy import Engine, SamplingParams
from miro_cy._kernels import select
from miro_cy.errors import ModelFormatError, ModelNotFound, Unsupported, UnsupportedModel
from miro_cy.formats.safetensors import SafetensorsFolder
from miro_cy.model.opening import open_checkpoint

Golden = Callable[[str], Path]
F32 = NDArray[np.float32]
MODELS = [
    "llama",
    "llama-tied-bias",
    "llama-mha-headdim",
    "llama-odd",
    "llama-headdim96",
    "llama3-rope",
    "llama-linear-rope",
    "qwen3",
]
TOLERANCE = 2e-3
IDS = [5, 300, 17, 17, 2, 101]


def logits_of(path: Path, max_num_seqs: int = 1) -> F32:
    with Engine.load(path, threads=1, compute="exact", max_num_seqs=max_num_seqs) as engine:
        return engine.logits(IDS)


def assert_same_bits(got: F32, want: F32) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def refuse(path: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        Engine.load(path, threads=1)


# --- the reference models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_reference_folders(isa: str, golden_file: Golden, name: str) -> None:
    golden = np.load(golden_file(f"hf/{name}/golden.npz"))
    greedy = golden["greedy"].tolist()
    folder = golden_file(f"hf/{name}/model.safetensors").parent
    with Engine.load(folder, threads=2) as engine:
        assert engine.name == name
        assert f"-exact-fp32-{isa}-" in engine.fingerprint
        logits = engine.logits(golden["ids"])
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(greedy))
        assert engine.generate({"tokens": golden["ids"]}, params).tokens == greedy
    assert np.abs(logits - golden["logits"]).max() <= TOLERANCE * np.ptp(golden["logits"])
    with Engine.load(golden_file(f"hf/{name}/model-f32.gguf"), threads=1) as engine:
        assert_same_bits(logits, engine.logits(golden["ids"]))


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_reference_with_a_window(isa: str, golden_file: Golden, block_size: int) -> None:
    """A mistral whose queries see 24 keys; a llama of the same weights sees all, and is another model."""
    path = golden_file("hf/mistral-swa/model.safetensors").parent
    golden = np.load(path / "golden.npz")
    greedy = golden["greedy"].tolist()
    with Engine.load(path, threads=2, block_size=block_size, max_step_tokens=29) as engine:
        assert {layer.window for layer in engine._parts.spec.layers} == {24}
        logits = engine.logits(golden["ids"])
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(greedy))
        assert engine.generate({"tokens": golden["ids"]}, params).tokens == greedy
    assert np.abs(logits - golden["logits"]).max() <= TOLERANCE * np.ptp(golden["logits"])


@pytest.mark.parametrize(("stated", "window"), [(None, 0), ("absent", 4096), (7, 7), (512, 512)])
def test_the_window_of_a_mistral(open_folder: Callable[[str], Any], stated: object, window: int) -> None:
    folder = open_folder("mistral-swa")
    folder.config["sliding_window"] = stated
    if stated == "absent":
        del folder.config["sliding_window"]
    with open_checkpoint(folder.write()) as stored:
        assert {layer.window for layer in stored.spec.layers} == {window}
        assert stored.spec.architecture == "mistral"


@pytest.mark.parametrize("stated", [0, -1, 2**25, 1.5, True, "24"])
def test_impossible_windows(open_folder: Callable[[str], Any], stated: object) -> None:
    folder = open_folder("mistral-swa")
    folder.config["sliding_window"] = stated
    refuse(folder.write(), ModelFormatError, "sliding_window must be an integer between 1 and")


def test_the_scalings_do_something(golden_file: Golden) -> None:
    with (
        open_checkpoint(golden_file("hf/llama3-rope/model.safetensors").parent) as from_config,
        open_checkpoint(golden_file("hf/llama3-rope/model-f32.gguf")) as from_tensor,
    ):
        rope = from_config.spec.rope
        assert rope == from_tensor.spec.rope
    assert (rope.factor, rope.factors[0], rope.factors[-1]) == (1.0, 1.0, 8.0)
    assert 1 < rope.factors[1] < 8


# --- files and element types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2, 5])
def test_several_files(folder: Any, shards: int) -> None:
    want = logits_of(folder.write())
    assert_same_bits(logits_of(folder.write(shards=shards)), want)


def test_elements_that_the_file_does_not_align(folder: Any) -> None:
    path = folder.write()
    want = logits_of(path)
    file = path / "model.safetensors"
    content = file.read_bytes()
    end = 8 + struct.unpack_from("<Q", content)[0]
    file.write_bytes(struct.pack("<Q", end - 7) + content[8:end] + b" " + content[end:])
    assert SafetensorsFolder(path).tensors["lm_head.weight"].offset % 4 == 1
    assert_same_bits(logits_of(path), want)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_sixteen_bit_weights_stay_what_they_are(isa: str, folder: Any, dtype: str) -> None:
    """The same bits as a float32 folder that holds the widened values: nothing is lost, nothing is rounded again."""

    def shorten(x: F32) -> NDArray[Any]:
        return x.astype(np.float16) if dtype == "F16" else (x.view(np.uint32) >> 16).astype(np.uint16)

    def widened(x: F32) -> F32:
        short = shorten(x)
        return short.astype(np.float32) if dtype == "F16" else (short.astype(np.uint32) << 16).view(np.float32)

    whole = dict(folder.tensors)
    folder.convert(dtype, shorten)
    stored = folder.write()
    got, many = logits_of(stored), logits_of(stored, max_num_seqs=64)
    folder.tensors = whole
    folder.convert("F32", widened)
    want = logits_of(folder.write())
    if isa == select.TILES:  # they add as exactly, but in another order
        assert np.abs(got - want).max() <= 1e-5 * np.ptp(want)
    else:
        assert_same_bits(got, want)
    # which engines for many do where they can
    assert np.abs(many - want).max() <= 1e-5 * np.ptp(want)
    assert np.array_equal(many, want) != select.has_tiles()


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
def test_other_element_types_are_refused(folder: Any, name: str, dtype: str) -> None:
    _, shape, _ = folder.tensors[name]
    folder.tensors[name] = (dtype, shape, bytes(int(np.prod(shape)) * (8 if dtype == "F64" else 1)))
    refuse(folder.write(), UnsupportedModel, f"tensor {name} has type {dtype}; supported are F32, F16, BF16")


def test_which_file_of_a_folder_is_loaded(folder: Any, golden_file: Golden) -> None:
    path = folder.write()
    shutil.copy(golden_file("gguf/Q4_0.gguf"), path / "other.gguf")
    with Engine.load(path, threads=1) as engine:
        assert (engine.name, engine.vocab_size) == ("model", 320)
        assert "-exact-" in engine.fingerprint
    refuse(path / "model.safetensors", ModelFormatError, "name the folder")
    (path / "model.safetensors").unlink()
    with Engine.load(path, threads=1) as engine:
        assert engine.name == "other"
        assert "-exact-" not in engine.fingerprint
    refuse(path / "gone.safetensors", ModelNotFound, "gone.safetensors")
    shutil.copy(path / "other.gguf", path / "another.gguf")
    refuse(path, ModelFormatError, "a folder with 2 .gguf files; name one of them")
    shutil.rmtree(path)
    path.mkdir()
    refuse(path, ModelFormatError, "neither .safetensors files nor a .gguf file")


def test_fingerprint_tells_folders_apart(folder: Any) -> None:
    def fingerprint() -> str:
        with Engine.load(folder.write(shards=2), threads=1) as engine:
            return engine.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    dtype, shape, raw = folder.tensors["model.layers.1.mlp.up_proj.weight"]
    folder.tensors["model.layers.1.mlp.up_proj.weight"] = (dtype, shape, bytes([raw[0] ^ 1]) + raw[1:])
    assert fingerprint() != before


# --- tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_each_tensor_is_needed_in_its_shape(open_folder: Callable[[str], Any], model: str) -> None:
    folder = open_folder(model)
    whole = dict(folder.tensors)
    for name, (dtype, shape, raw) in whole.items():
        folder.tensors = {other: tensor for other, tensor in whole.items() if other != name}
        refuse(folder.write(), ModelFormatError, f"tensor {name} is missing")
        folder.tensors = whole | {name: (dtype, (*shape[:-1], shape[-1] // 2, 2), raw)}
        refuse(folder.write(), ModelFormatError, f"tensor {name} has shape .*, expected")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "x\n",
        "rotary_emb.inv_freq",
    ],
)
def test_extra_tensor(folder: Any, name: str) -> None:
    folder.tensors[name] = ("F32", (64,), bytes(256))
    refuse(folder.write(), ModelFormatError, "is not part of a llama model")


@pytest.mark.parametrize(("switch", "name"), [("attention_bias", "self_attn.k_proj"), ("mlp_bias", "mlp.gate_proj")])
def test_biases_that_the_configuration_asks_for(folder: Any, switch: str, name: str) -> None:
    folder.config[switch] = True
    for layer in (0, 1):
        for part, size in [("q", 64), ("k", 32), ("v", 32), ("o", 64)]:
            if switch == "attention_bias":
                folder.tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = ("F32", (size,), bytes(4 * size))
        for part, size in [("gate", 160), ("up", 160), ("down", 64)]:
            if switch == "mlp_bias":
                folder.tensors[f"model.layers.{layer}.mlp.{part}_proj.bias"] = ("F32", (size,), bytes(4 * size))
    Engine.load(folder.write(), threads=1).close()
    del folder.tensors[f"model.layers.1.{name}.bias"]
    refuse(folder.write(), ModelFormatError, f"tensor model.layers.1.{name}.bias is missing")


def test_tensors_that_some_writers_store_in_vain(folder: Any) -> None:
    folder.config["tie_word_embeddings"] = True
    folder.tensors["lm_head.weight"] = ("F32", (320, 64), bytes(320 * 64 * 4))
    folder.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))
    assert np.ptp(logits_of(folder.write())) > 0  # the zeros above are not the output matrix


# --- without a tokenizer -----------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_serves_token_ids(folder: Any) -> None:
    with Engine.load(folder.write(), threads=1) as engine:
        assert not engine.tokenizer.supported
        assert engine.tokenizer.bos_id == 1
        done = engine.generate({"tokens": IDS}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert (len(done.tokens), done.text) == (4, "")
        for prompt in ("text", {"messages": [{"role": "user", "content": "hello"}]}):
            with pytest.raises(Unsupported, match=r"tokenizer \(none\) is not supported"):
                engine.generate(prompt)


def test_every_eos_token_ends_an_answer(folder: Any) -> None:
    """The union of what both files name."""
    params = SamplingParams(temperature=0, max_tokens=8)
    folder.config["eos_token_id"], folder.generation = None, None
    with Engine.load(folder.write(), threads=1) as engine:
        tokens = engine.generate({"tokens": IDS}, params).tokens
    first, second = tokens[0], next(token for token in tokens if token != tokens[0])
    folder.config["eos_token_id"], folder.generation = second, {"eos_token_id": [319, first]}
    with Engine.load(folder.write(), threads=1) as engine:
        assert engine.tokenizer.eos_ids == {first, second, 319}
        done = engine.generate({"tokens": IDS}, params)
        assert (done.finish_reason, done.tokens) == ("stop", tokens[:1])
    folder.generation = {"eos_token_id": 319}
    with Engine.load(folder.write(), threads=1) as engine:
        done = engine.generate({"tokens": IDS}, params)
        assert (done.finish_reason, done.tokens) == ("stop", tokens[: tokens.index(second) + 1])
