"""The llama architecture in GGUF files: metadata -> ModelSpec, and the tensors it is made of."""

from __future__ import annotations

import math

from miro_cy.errors import ModelFormatError, UnsupportedModel
from miro_cy.formats.gguf import GGUFFile
from miro_cy.model.spec import AttentionSpec, ModelSpec, RopeSpec

#: role -> tensor name and shape, as names of ModelSpec-derived sizes (see `sizes`)
MODEL_TENSORS = {
    "embedding": ("token_embd.weight", ("vocab", "hidden")),
    "output": ("output.weight", ("vocab", "hidden")),
    "output_norm": ("output_norm.weight", ("hidden",)),
}
LAYER_TENSORS = {
    "attn_norm": ("attn_norm.weight", ("hidden",)),
    "q": ("attn_q.weight", ("q", "hidden")),
    "k": ("attn_k.weight", ("kv", "hidden")),
    "v": ("attn_v.weight", ("kv", "hidden")),
    "o": ("attn_output.weight", ("hidden", "q")),
    "ffn_norm": ("ffn_norm.weight", ("hidden",)),
    "gate": ("ffn_gate.weight", ("ffn", "hidden")),
    "up": ("ffn_up.weight", ("ffn", "hidden")),
    "down": ("ffn_down.weight", ("hidden", "ffn")),
}
LAYER_BIASES = {
    "q_bias": ("attn_q.bias", ("q",)),
    "k_bias": ("attn_k.bias", ("kv",)),
    "v_bias": ("attn_v.bias", ("kv",)),
    "o_bias": ("attn_output.bias", ("hidden",)),
    "gate_bias": ("ffn_gate.bias", ("ffn",)),
    "up_bias": ("ffn_up.bias", ("ffn",)),
    "down_bias": ("ffn_down.bias", ("hidden",)),
}
#: What no sane checkpoint exceeds; bounds every size before anything is allocated.
LIMITS = {
    "block_count": 1024,
    "embedding_length": 1 << 17,
    "feed_forward_length": 1 << 20,
    "attention.head_count": 1 << 12,
    "attention.head_count_kv": 1 << 12,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "rope.dimension_count": 512,
    "context_length": 1 << 24,
}


def sizes(spec: ModelSpec) -> dict[str, int]:
    """The dimensions tensor shapes are made of."""
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "q": spec.n_heads * spec.head_dim,
        "kv": spec.n_kv_heads * spec.head_dim,
        "ffn": spec.ffn_size,
    }


def read_spec(file: GGUFFile) -> ModelSpec:
    """The file's ModelSpec. Raises UnsupportedModel naming what is not supported, ModelFormatError on bad sizes."""
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise UnsupportedModel(f"{file.path}: architecture {architecture!r:.80} is not supported (llama is)")
    _refuse_variants(file)
    hidden = _size(file, "embedding_length")
    heads = _size(file, "attention.head_count")
    head_dim = _size(file, "attention.key_length", hidden // heads)
    if _size(file, "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: key and value heads of different sizes are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{file.path}: tensor token_embd.weight is missing or not a matrix")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=_size(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=_size(file, "feed_forward_length"),
        context=_size(file, "context_length"),
        norm_eps=_positive(file, "llama.attention.layer_norm_rms_epsilon"),
        rope=RopeSpec(
            theta=_positive(file, "llama.rope.freq_base", 10000.0), dim=_size(file, "rope.dimension_count", head_dim)
        ),
        layers=(AttentionSpec(),) * _size(file, "block_count"),
        tied_output="output.weight" not in file.tensors,
    )
    if problem := spec.problems():
        raise ModelFormatError(f"{file.path}: {problem}")
    return spec


def _refuse_variants(file: GGUFFile) -> None:
    scaling = file.get("llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise UnsupportedModel(f"{file.path}: RoPE scaling {scaling!r:.80} is not supported")
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        # A factor with no type beside it means linear scaling, the only kind that older files know.
        if "llama.rope.scaling.type" not in file.metadata and file.get(key, float, 1.0) not in (0.0, 1.0):
            raise UnsupportedModel(f"{file.path}: RoPE scaling ({key}) is not supported")
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedModel(f"{file.path}: RoPE scaling by factors (rope_freqs.weight) is not supported")
    if not file.get("llama.attention.causal", bool, True):
        raise UnsupportedModel(f"{file.path}: attention that is not causal is not supported")
    if file.get("llama.expert_count", int, 0):
        raise UnsupportedModel(f"{file.path}: mixture-of-experts layers are not supported")


def _size(file: GGUFFile, name: str, default: int | None = None) -> int:
    key = f"llama.{name}"
    value = file.get(key, int) if default is None else file.get(key, int, default)
    if not 1 <= value <= LIMITS[name]:
        raise ModelFormatError(f"{file.path}: {key} must be between 1 and {LIMITS[name]}, not {value}")
    return value


def _positive(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.get(key, float) if default is None else file.get(key, float, default)
    if not math.isfinite(value) or value <= 0:
        raise ModelFormatError(f"{file.path}: {key} must be a positive number, not {value}")
    return value
