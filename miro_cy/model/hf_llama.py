"""The llama architecture in Hugging Face folders: config.json -> ModelSpec, and where its tensors are.

A mistral is a llama with a window on every layer, which later ones do without, and other defaults. A qwen3 is one whose
heads of q and k are normalised, with windows on some layers if the file says so.

Both spellings of the configuration are read: rope_theta and rope_scaling, or rope_parameters as transformers 5 writes.
"""

from __future__ import annotations

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
from miro_cy.model.spec import NUMBERS, SIZE_LIMITS, AttentionSpec, ModelSpec, RopeSpec

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "output": "lm_head.weight",
    "output_norm": "model.norm.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
#: model_type -> what transformers' configuration has where the file says nothing; elsewhere the number of heads is that
#: of KV heads, and they share the hidden size.
DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
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

    def size(self, key: str, limit: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= SIZE_LIMITS[limit]:
            self.fail(f"{key} must be an integer between {least} and {SIZE_LIMITS[limit]}, not {shown(value)}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        least, most = NUMBERS
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            self.fail(f"{key} must be a positive number, {least:g} to {most:g}, not {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
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
    """The ModelSpec of a config.json whose model_type DEFAULTS knows."""
    architecture = config.values.get("model_type")
    if not isinstance(architecture, str) or architecture not in DEFAULTS:
        config.refuse(f"model_type {shown(architecture)}")
    defaults = DEFAULTS[architecture]
    _refuse_variants(config)
    hidden = config.size("hidden_size", "hidden")
    heads = config.size("num_attention_heads", "heads")
    # For transformers a KV head count of null, unlike none at all, means one for each head.
    kv_heads = defaults.get("num_key_value_heads", heads) if "num_key_value_heads" not in config.values else heads
    head_dim = _head_dim(config, hidden, heads, defaults.get("head_dim"))
    n_layers = config.size("num_hidden_layers", "layers")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=config.size("vocab_size", "vocab"),
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=config.size("num_key_value_heads", "heads", kv_heads),
        head_dim=head_dim,
        ffn_size=config.size("intermediate_size", "ffn"),
        context=config.size("max_position_embeddings", "context", defaults["max_position_embeddings"]),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        layers=tuple(AttentionSpec(window=window) for window in _windows(config, architecture, n_layers)),
        tied_output=config.flag("tie_word_embeddings"),
        qk_norm=architecture == "qwen3",
    )
    if problem := spec.problems():
        config.fail(problem)
    return spec


def _refuse_variants(config: Config) -> None:
    activation = config.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        config.refuse(f"hidden_act {shown(activation)}")
    if config.values.get("quantization_config"):
        config.refuse("a quantised folder (quantization_config)")
    if not config.flag("is_causal", True):
        config.refuse("attention that is not causal (is_causal)")


def _head_dim(config: Config, hidden: int, heads: int, default: int | None) -> int:
    if default is None and config.values.get("head_dim") is None and hidden % heads:
        config.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim")
    return config.size("head_dim", "head_dim", default or hidden // heads)


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


def _windows(config: Config, architecture: str, n_layers: int) -> list[int]:
    """Keys that a query sees in each layer, 0 for all. Where the file says nothing it is 4096, and null means none.

    A mistral has a window in every layer. A qwen3 has one where `layer_types` says so or, without those, from layer
    max_window_layers on; both only if use_sliding_window is set.
    """
    used = architecture == "mistral" or (architecture == "qwen3" and config.flag("use_sliding_window"))
    stated = used and config.values.get("sliding_window", 4096) is not None
    window = config.size("sliding_window", "context", 4096) if stated else 0
    if architecture != "qwen3":
        return [window] * n_layers
    if config.values.get("layer_types") is None:
        first = config.size("max_window_layers", "layers", 28, least=0) if window else n_layers
        return [window if layer >= first else 0 for layer in range(n_layers)]
    return [window if windowed else 0 for windowed in _windowed_layers(config, n_layers, window)]


def _windowed_layers(config: Config, n_layers: int, window: int) -> list[bool]:
    """Which layers `layer_types` gives the window to."""
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != n_layers or not all(isinstance(kind, str) for kind in kinds):
        config.fail(f"layer_types must be {n_layers} names, one a layer, not {shown(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse(f"a layer of kind {shown(kind)} (layer_types)")
    windowed = [kind == "sliding_attention" for kind in kinds]
    if any(windowed) and not window:
        config.fail("layer_types names sliding_attention, but use_sliding_window and sliding_window give no window")
    return windowed


def _generation(folder: Path, config: Config, vocab_size: int) -> GenerationDefaults:
    path = folder / "generation_config.json"
    stated = read_json(path) if path.exists() else {}
    return read_generation(config.values, config.label, stated, str(path), vocab_size)
