"""What the files of a qwen3 may say: windows, norms, and which variants are refused, by which name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miro_cy import Engine
from miro_cy.errors import ModelFormatError, UnsupportedModel
from miro_cy.formats.ggml_types import GGMLType
from miro_cy.model.opening import open_checkpoint

#: What gives layer 1 of the two a window of 7 keys.
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None}


def refuse(path: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        Engine.load(path, threads=1)


@pytest.fixture
def folder(open_folder: Callable[[str], Any]) -> Any:
    return open_folder("qwen3")


# --- config.json -------------------------------------------------------------------------------------------------


def test_what_the_files_say(golden_file: Callable[[str], Path]) -> None:
    with (
        open_checkpoint(golden_file("hf/qwen3/model.safetensors").parent) as stored,
        open_checkpoint(golden_file("hf/qwen3/model-f32.gguf")) as converted,
    ):
        spec = stored.spec
        # The GGUF file has the constant in float32.
        assert dataclasses.replace(converted.spec, norm_eps=spec.norm_eps) == spec
        assert converted.spec.norm_eps == np.float32(spec.norm_eps)
        norms = [part.role for part in stored.parts() if part.role.endswith("_norm") and part.layer == 1]
    assert (spec.architecture, spec.qk_norm, spec.head_dim) == ("qwen3", True, 32)
    assert norms == ["attn_norm", "ffn_norm", "q_norm", "k_norm"]
    assert {layer.window for layer in spec.layers} == {0}


def test_defaults(folder: Any) -> None:
    for key in ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        del folder.config[key]
    folder.config["num_attention_heads"] = 32
    with open_checkpoint(folder.write()) as stored:
        spec = stored.spec
    assert (spec.head_dim, spec.n_kv_heads, spec.context, spec.norm_eps) == (128, 32, 32768, 1e-6)
    folder.config |= {"num_key_value_heads": None, "num_attention_heads": 48}
    with open_checkpoint(folder.write()) as stored:
        assert stored.spec.n_kv_heads == 48


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (WINDOW, (0, 7)),
        (WINDOW | {"max_window_layers": 0}, (7, 7)),
        (WINDOW | {"max_window_layers": 2}, (0, 0)),
        (WINDOW | {"max_window_layers": None}, (0, 0)),  # 28
        (WINDOW | {"sliding_window": None}, (0, 0)),
        (WINDOW | {"use_sliding_window": False}, (0, 0)),
        (WINDOW | {"use_sliding_window": None}, (0, 0)),
        (WINDOW | {"layer_types": [SLIDING, FULL]}, (7, 0)),
        (WINDOW | {"layer_types": [FULL, FULL]}, (0, 0)),
        ({"use_sliding_window": False, "sliding_window": 7, "layer_types": [FULL, FULL]}, (0, 0)),
    ],
)
def test_which_layers_have_a_window(folder: Any, changes: dict[str, Any], windows: tuple[int, int]) -> None:
    folder.config |= changes
    with open_checkpoint(folder.write()) as stored:
        assert tuple(layer.window for layer in stored.spec.layers) == windows


def test_a_window_of_no_stated_size_has_4096_keys(folder: Any) -> None:
    folder.config |= WINDOW
    del folder.config["sliding_window"]
    with open_checkpoint(folder.write()) as stored:
        assert [layer.window for layer in stored.spec.layers] == [0, 4096]


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"use_sliding_window": 1}, ModelFormatError, "use_sliding_window must be true or false"),
        ({"sliding_window": 0}, ModelFormatError, "sliding_window must be an integer between 1 and"),
        ({"sliding_window": True}, ModelFormatError, "sliding_window must be an integer between 1 and"),
        ({"max_window_layers": -1}, ModelFormatError, "max_window_layers must be an integer between 0 and 1024"),
        ({"max_window_layers": 1.0}, ModelFormatError, "max_window_layers must be an integer"),
        ({"layer_types": [FULL]}, ModelFormatError, "layer_types must be 2 names"),
        ({"layer_types": FULL}, ModelFormatError, "layer_types must be 2 names"),
        ({"layer_types": [FULL, 1]}, ModelFormatError, "layer_types must be 2 names"),
        ({"layer_types": [FULL, "chunked_attention"]}, UnsupportedModel, r"'chunked_attention' \(layer_types\)"),
        ({"layer_types": [FULL, "linear_attention"]}, UnsupportedModel, r"'linear_attention' \(layer_types\)"),
        ({"layer_types": [FULL, SLIDING], "use_sliding_window": False}, ModelFormatError, "layer_types names sliding"),
        ({"layer_types": [FULL, SLIDING], "sliding_window": None}, ModelFormatError, "layer_types names sliding"),
        ({"head_dim": 31}, ModelFormatError, "rotary dimension 31"),
        ({"head_dim": 16}, ModelFormatError, "q_proj.weight has shape"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModel, "scaling 'yarn'"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"is_causal": False}, UnsupportedModel, "is_causal"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModel, "quantization_config"),
        ({"model_type": "qwen3_moe"}, UnsupportedModel, "model_type 'qwen3_moe'"),
        ({"model_type": "llama", "layer_types": None}, ModelFormatError, "is not part of a llama model"),
    ],
)
def test_what_is_refused(folder: Any, changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    folder.config |= WINDOW | changes
    refuse(folder.write(), kind, match)


def test_a_llama_has_no_norms_of_heads(open_folder: Callable[[str], Any]) -> None:
    folder = open_folder("llama")
    folder.config["model_type"] = "qwen3"
    refuse(folder.write(), ModelFormatError, r"tensor model.layers.0.self_attn.q_norm.weight is missing")


# --- GGUF files --------------------------------------------------------------------------------------------------


@pytest.fixture
def qwen3_file(checkpoint: Any) -> Any:
    """The small checkpoint as a qwen3."""
    checkpoint.metadata = {
        key.replace("llama.", "qwen3."): value for key, value in checkpoint.metadata.items() if "dimension" not in key
    }
    checkpoint.metadata["general.architecture"] = "qwen3"
    for part in ("q", "k"):
        checkpoint.tensors[f"blk.0.attn_{part}_norm.weight"] = ((16,), GGMLType.F32)
    return checkpoint


def test_the_small_file_is_sound(qwen3_file: Any) -> None:
    with Engine.load(qwen3_file.write(), threads=1) as engine:
        assert engine.describe()["architecture"] == "qwen3"
        assert np.ptp(engine.logits([1, 2, 3])) > 0


def test_rows_of_quantised_pairs_become_neighbours(qwen3_file: Any) -> None:
    qwen3_file.tensors["blk.0.attn_q.weight"] = ((64, 64), GGMLType.Q8_0)
    path = qwen3_file.write()
    with open_checkpoint(path) as stored:
        part = next(part for part in stored.parts() if part.role == "q")
        at, size = part.tensor.offset, part.tensor.nbytes
    content = path.read_bytes()
    rows = np.random.default_rng(1).integers(0, 256, (4, 2, 8, 68), dtype=np.uint8)  # heads, halves, pairs, bytes
    path.write_bytes(content[:at] + rows.tobytes() + content[at + size :])
    with open_checkpoint(path) as stored:
        assert np.array_equal(stored.data(part).reshape(4, 8, 2, 68), rows.swapaxes(1, 2))


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"])
def test_norms_in_a_gguf_file(qwen3_file: Any, name: str) -> None:
    for shape in ((15,), (64,), (16, 1), (1, 16)):
        qwen3_file.tensors[name] = (shape, GGMLType.F32)
        refuse(qwen3_file.write(), ModelFormatError, rf"tensor {name} has shape .*, expected \(16,\)")
    qwen3_file.tensors[name] = ((16,), GGMLType.I16)
    refuse(qwen3_file.write(), UnsupportedModel, f"tensor {name} has type I16")
    del qwen3_file.tensors[name]
    refuse(qwen3_file.write(), ModelFormatError, f"tensor {name} is missing")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("attention.sliding_window", 128, "qwen3.attention.sliding_window 128"),
        ("attention.sliding_window", -1, "qwen3.attention.sliding_window -1"),
        ("rope.dimension_count", 8, "qwen3.rope.dimension_count 8"),
        ("rope.scaling.type", "yarn", "RoPE scaling 'yarn'"),
        ("rope.scaling.attn_factor", 1.2, "qwen3.rope.scaling.attn_factor"),
        ("attention.causal", False, "not causal"),
        ("expert_count", 8, "mixture-of-experts"),
        ("attention.value_length", 8, "different sizes"),
    ],
)
def test_variants_of_gguf_files(qwen3_file: Any, key: str, value: Any, match: str) -> None:
    qwen3_file.metadata[f"qwen3.{key}"] = value
    refuse(qwen3_file.write(), UnsupportedModel, match)


@pytest.mark.parametrize("window", [0, 256, 2**31])
def test_a_window_that_is_never_full(qwen3_file: Any, window: int) -> None:
    qwen3_file.metadata["qwen3.attention.sliding_window"] = window
    with open_checkpoint(qwen3_file.write()) as stored:
        assert stored.spec.layers[0].window == 0


def test_each_required_key_is_named(qwen3_file: Any) -> None:
    whole = dict(qwen3_file.metadata)
    for key in set(whole) - {"qwen3.attention.head_count_kv"}:
        qwen3_file.metadata = {other: value for other, value in whole.items() if other != key}
        refuse(qwen3_file.write(), ModelFormatError, f"'{key}' is missing")
