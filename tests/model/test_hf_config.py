"""config.json and generation_config.json: both spellings, defaults, and what is refused, by which name."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.errors import ModelError, ModelFormatError, ModelNotFound, UnsupportedModel
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.spec import SIZE_LIMITS

MIB = 2**20


def refuse(path: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        Engine.load(path, threads=1)


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "llama-linear-rope"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_both_spellings_of_the_configuration(open_folder: Callable[[str], Any], name: str, type_key: str) -> None:
    folder = open_folder(name)
    with open_checkpoint(folder.write()) as stored:
        want = stored.spec
    config = folder.config
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    del config["head_dim"]
    with open_checkpoint(folder.write()) as stored:
        assert stored.spec == want


def test_defaults_of_the_configuration(folder: Any) -> None:
    optional = (
        "head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    for key in optional:
        folder.config.pop(key)
    folder.config["rope_scaling"] = None
    with open_checkpoint(folder.write()) as stored:
        spec = stored.spec
    assert (spec.head_dim, spec.n_kv_heads, spec.context, spec.norm_eps) == (16, 4, 2048, 1e-6)
    assert (spec.rope.theta, spec.rope.scaling, spec.tied_output) == (10000.0, "none", False)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"is_causal": False}, "is_causal"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "scaling 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama4"}}, "scaling 'llama4'"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for each kind of layer"),
    ],
)
def test_unsupported_variants(folder: Any, changes: dict[str, Any], match: str) -> None:
    folder.config |= changes
    refuse(folder.write(), UnsupportedModel, match)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_attention_heads": 3, "head_dim": None}, "not a multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "rotary dimension 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e-300}}, "rope_theta must be a positive number, 1e-12 to 1e"),
        ({"rope_parameters": {"rope_theta": 1e19}}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 5e-324}}, "factor must be a positive number"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 1e-12, "rope_theta": 1e-12},
                "max_position_embeddings": 1 << 24,
            },
            "turn the last position by more",
        ),
        ({"rope_parameters": [1]}, "RoPE settings"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor must be a positive number"),
        ({"rope_parameters": LLAMA3}, "original_max_position_embeddings is missing"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"is_causal": 0}, "is_causal must be true or false"),
        ({"eos_token_id": 320}, "eos_token_id must be token ids below 320"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"eos_token_id": {"a": 2}}, "eos_token_id"),
        ({"bos_token_id": True}, "bos_token_id"),
        ({"vocab_size": 319}, "tensor model.embed_tokens.weight has shape"),
    ],
)
def test_impossible_settings(folder: Any, changes: dict[str, Any], match: str) -> None:
    folder.config |= changes
    refuse(folder.write(), ModelFormatError, match)


SIZES = {
    "vocab_size": "vocab", "hidden_size": "hidden", "intermediate_size": "ffn", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "heads", "head_dim": "head_dim",
    "max_position_embeddings": "context",
}  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_absurd_sizes_cost_nothing(folder: Any, key: str) -> None:
    limit = SIZE_LIMITS[SIZES[key]]
    tracemalloc.start()
    try:
        for value in (0, -1, limit + 1, 2**63, 10**300, 1.5, "64", [64], True):
            folder.config[key] = value
            refuse(folder.write(), ModelFormatError, f"{key} must be an integer between 1 and {limit}")
        if key != "max_position_embeddings":
            folder.config[key] = limit
            refuse(folder.write(), ModelFormatError, "model")
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    if key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        del folder.config[key]
        refuse(folder.write(), ModelFormatError, f"{key} is missing")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"{", b"\xff{}", b'{"a":' * 50_000, b"9" * 10_000])
def test_settings_that_are_no_object(folder: Any, name: str, content: bytes) -> None:
    (folder.write() / name).write_bytes(content)
    refuse(folder.path, ModelFormatError, name)


def test_a_folder_without_its_configuration(folder: Any) -> None:
    (folder.write() / "config.json").unlink()
    refuse(folder.path, ModelNotFound, "config.json")
    (folder.path / "config.json").mkdir()
    refuse(folder.path, ModelFormatError, "config.json is not a file but a folder")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_promise_a_model_file_is_data_under_mutation_of_its_configuration(
    open_folder: Callable[[str], Any], name: str
) -> None:
    """A typed error or a correct load; never another exception, never much memory."""
    folder = open_folder(name)
    values: list[Any] = [None, 0, 1, 2, -1, 2**31, 2**64, 0.5, 1e300, "", "llama", True, False, [], [1], {}, {"a": 1}]
    draw = random.Random(20240608)
    path = folder.write()
    sound = json.dumps(folder.config)
    with open_checkpoint(path) as stored:
        want = stored.spec
    outcomes = {"same": 0, "loaded": 0, "refused": 0}
    for _ in range(600):
        if draw.random() < 0.5:
            config = json.loads(sound)
            home = draw.choice([config, config, config["rope_parameters"]])
            home[draw.choice([*home, "rope_scaling", "rope_theta", "rope_type", "factor"])] = draw.choice(values)
            text = json.dumps(config).encode()
        else:
            mutant = bytearray(sound.encode())
            for _ in range(draw.randint(1, 3)):
                mutant[draw.randrange(len(mutant))] = draw.choice(b'0129.-e"[]{}:,x\xff\0')
            text = bytes(mutant)
        (path / "config.json").write_bytes(text)
        try:
            with open_checkpoint(path) as stored:
                stored.parts()
                outcomes["same" if stored.spec == want else "loaded"] += 1
        except ModelError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes


# --- generation_config.json


@pytest.mark.parametrize(
    ("stated", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.6}, {}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0}, {"temperature": 0.6, "top_k": 1}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "typical_p": 1.0},
         {"temperature": 0.6, "top_p": 0.9, "top_k": 50}),
    ],
)  # fmt: skip
def test_sampling_defaults(folder: Any, stated: dict[str, Any], sampling: dict[str, Any]) -> None:
    folder.generation = stated
    with Engine.load(folder.write(), threads=1) as engine:
        assert engine.generation.sampling == sampling
        SamplingParams(**engine.generation.sampling)


@pytest.mark.parametrize(
    ("stated", "match"),
    [
        ({"temperature": "hot"}, "generation_config.json: temperature must be a number"),
        ({"temperature": -1}, "temperature must be between 0.0 and 2.0"),
        ({"top_p": 1.5}, "top_p must be between"),
        ({"top_k": 0.5}, "top_k must be a number"),
        ({"top_k": 10**400}, "top_k"),
        ({"temperature": 10**400}, "temperature"),
        ({"do_sample": "yes"}, "do_sample must be true or false"),
        ({"eos_token_id": [320]}, "generation_config.json: eos_token_id"),
    ],
)
def test_unsound_generation_settings(folder: Any, stated: dict[str, Any], match: str) -> None:
    folder.generation = stated
    refuse(folder.write(), ModelFormatError, match)
