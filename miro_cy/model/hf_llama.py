"""The llama architecture in Hugging Face folders: config.json -> ModelSpec, and where its tensors are.

A mistral is a llama with a window on every layer, which later ones do without, and other defaults.

Both spellings of the configuration are read: rope_theta and rope_scaling, or rope_parameters as transformers 5 writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from miro_client.checks import shown
from miro_cy.errors import ModelFormatError, UnsupportedModel
from miro_cy.formats.mapped import read_json
from miro_cy.formats.safetensors import SafetensorsFolder
from miro_cy.model.checkpoint import Checkpoint
from miro_cy.model.generation import GenerationDefaults, read_generation
from miro_cy.model.rope import llama3_factors
from miro_cy.model.spec import SIZE_LIMITS, AttentionSpec, ModelSpec, RopeSpec

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "output": "lm_head.weight",
    "output_norm": "model.norm.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
#: The switch in config.json that gives projections biases -> which ones, all of them or none.
BIASES = {
    "attention_bias": {role: f"model.layers.{{}}.self_attn.{role[0]}_proj.bias" for role in
                       ("q_bias", "k_bias", "v_bias", "o_bias")},
    "mlp_bias": {f"{part}_bias": f"model.layers.{{}}.mlp.{part}_proj.bias" for part in ("gate", "up", "down")},
}  # fmt: skip
#: Rotary tables that old checkpoints store although the configuration gives them.
STORED_TABLE = "model.layers.{}.self_attn.rotary_emb.inv_freq"


class Config:
    """config.json with typed access; every failure names the file and the field."""

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        self.values = values
        self.label = label

    def size(self, key: str, limit: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= SIZE_LIMITS[limit]:
            self.fail(f"{key} must be an integer between 1 and {SIZE_LIMITS[limit]}, not {shown(value)}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        number = math.nan
        if not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) < 1e30:
            number = float(value)
        if not number > 0:
            self.fail(f"{key} must be a positive number, not {shown(value)}")
        return number

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            self.fail(f"{key} must be true or false, not {shown(value)}")
        return value

    def fail(self, message: str) -> NoReturn:
        raise ModelFormatError(f"{self.label}: {message}")

    def refuse(self, what: str) -> NoReturn:
        raise UnsupportedModel(f"{self.label}: {what} is not supported")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.fail(f"{key} is missing")
            return default
        return value


def open_folder(folder: Path) -> Checkpoint:
    """A Hugging Face folder as a Checkpoint.

    Raises ModelNotFound, ModelFormatError naming the file and the field or tensor, UnsupportedModel naming what is
    not supported.
    """
    config = Config(read_json(folder / "config.json"), str(folder / "config.json"))
    spec = read_spec(config)
    generation = _generation(folder, config, spec.vocab_size)
    names = dict(NAMES)
    for switch, roles in BIASES.items():
        if config.flag(switch):
            names |= roles
    ignored = [STORED_TABLE.format(layer) for layer in range(spec.n_layers)]
    if spec.tied_output:  # some writers store the embedding a second time
        ignored.append(names.pop("output"))
    source = SafetensorsFolder(folder)
    return Checkpoint(source, "safetensors", spec, names, ignored=ignored, split_pairs=True, generation=generation)


def read_spec(config: Config) -> ModelSpec:
    """The ModelSpec of a llama's or mistral's config.json, with the defaults of transformers' configurations."""
    architecture = config.values.get("model_type")
    if architecture not in ("llama", "mistral"):
        config.refuse(f"model_type {shown(architecture)}")
    activation = config.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        config.refuse(f"hidden_act {shown(activation)}")
    if config.values.get("quantization_config"):
        config.refuse("a quantised folder (quantization_config)")
    hidden = config.size("hidden_size", "hidden")
    heads = config.size("num_attention_heads", "heads")
    if hidden % heads and config.values.get("head_dim") is None:
        config.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
    head_dim = config.size("head_dim", "head_dim", hidden // heads)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=config.size("vocab_size", "vocab"),
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=config.size("num_key_value_heads", "heads", 8 if architecture == "mistral" else heads),
        head_dim=head_dim,
        ffn_size=config.size("intermediate_size", "ffn"),
        context=config.size("max_position_embeddings", "context", 131_072 if architecture == "mistral" else 2048),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        layers=(AttentionSpec(window=_window(config)),) * config.size("num_hidden_layers", "layers"),
        tied_output=config.flag("tie_word_embeddings"),
    )
    if problem := spec.problems():
        config.fail(problem)
    return spec


def read_rope(config: Config, head_dim: int) -> RopeSpec:
    """The rotary embedding, from rope_scaling and rope_theta or from rope_parameters."""
    stated = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        config.fail(f"the RoPE settings must be an object, not {shown(stated)}")
    # What both spellings may say at the top level is said there for all of them.
    shared = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    above = {key: config.values[key] for key in shared if config.values.get(key) is not None}
    rope = Config(above | stated, f"{config.label}: RoPE")
    kind = stated.get("rope_type") or stated.get("type")
    if any(isinstance(value, dict) for value in stated.values()):
        rope.refuse("a RoPE setting for each kind of layer")
    if kind is None:
        if "factor" in stated:  # a scaling ignored reads well and is wrong far into a text
            rope.fail("rope_type is missing")
        kind = "default"
    theta = rope.positive("rope_theta", 10000.0)
    if rope.positive("partial_rotary_factor", 1.0) != 1.0:
        rope.refuse("partial_rotary_factor other than 1")
    if kind == "default":
        return RopeSpec(theta, head_dim)
    if kind == "linear":
        return RopeSpec(theta, head_dim, factor=rope.positive("factor"))
    if kind != "llama3":
        rope.refuse(f"scaling {shown(kind)}")
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if low >= high:
        rope.fail(f"low_freq_factor {low} must be below high_freq_factor {high}")
    if head_dim % 2:
        rope.fail(f"head_dim {head_dim} is odd")
    factors = llama3_factors(
        theta,
        head_dim,
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=rope.size("original_max_position_embeddings", "context"),
    )
    return RopeSpec(theta, head_dim, factors=factors)


def _window(config: Config) -> int:
    """Keys that a query sees, 0 for all. Where a mistral's file says nothing it is 4096, and null means none."""
    if config.values["model_type"] != "mistral" or config.values.get("sliding_window", 4096) is None:
        return 0
    return config.size("sliding_window", "context", 4096)


def _generation(folder: Path, config: Config, vocab_size: int) -> GenerationDefaults:
    path = folder / "generation_config.json"
    stated = read_json(path) if path.exists() else {}
    return read_generation(config.values, config.label, stated, str(path), vocab_size)
