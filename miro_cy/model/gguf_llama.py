"""The llama architecture in GGUF files: metadata -> ModelSpec, and where its tensors are.

A qwen3 is a llama whose heads of q and k are normalised, and whose rotary pairs lie half a head apart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from miro_cy.errors import ModelFormatError, UnsupportedModel
from miro_cy.formats.gguf import GGUFFile
from miro_cy.model.checkpoint import BIAS_ROLES, Checkpoint
from miro_cy.model.spec import NUMBERS, SIZE_LIMITS, AttentionSpec, ModelSpec, RopeSpec

NAMES = {
    "embedding": "token_embd.weight",
    "output": "output.weight",
    "output_norm": "output_norm.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "o_bias": "blk.{}.attn_output.bias",
    "gate_bias": "blk.{}.ffn_gate.bias",
    "up_bias": "blk.{}.ffn_up.bias",
    "down_bias": "blk.{}.ffn_down.bias",
}
#: general.architecture, which its keys begin with -> whether q and k are normalised and pairs split.
ARCHITECTURES = {"llama": False, "qwen3": True}
#: What each pair's rotary frequency is divided by, for models with llama3 scaling.
ROPE_FACTORS = "rope_freqs.weight"
LIMITS = {
    "block_count": SIZE_LIMITS["layers"],
    "embedding_length": SIZE_LIMITS["hidden"],
    "feed_forward_length": SIZE_LIMITS["ffn"],
    "attention.head_count": SIZE_LIMITS["heads"],
    "attention.head_count_kv": SIZE_LIMITS["heads"],
    "attention.key_length": SIZE_LIMITS["head_dim"],
    "attention.value_length": SIZE_LIMITS["head_dim"],
    "rope.dimension_count": SIZE_LIMITS["head_dim"],
    "context_length": SIZE_LIMITS["context"],
}


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF file as a Checkpoint. Raises as GGUFFile and `read_spec` do, UnsupportedModel for a split file."""
    file = GGUFFile(path)
    try:
        if (pieces := file.get("split.count", int, 1)) > 1:
            raise UnsupportedModel(f"{path}: the checkpoint is split over {pieces} files; merge them")
        spec = read_spec(file)
    except BaseException:
        file.close()
        raise
    names = {role: name for role, name in NAMES.items() if not (role == "output" and spec.tied_output)}
    return Checkpoint(
        file,
        f"GGUF {file.version}",
        spec,
        names,
        optional=BIAS_ROLES,
        ignored=(ROPE_FACTORS,),
        split_pairs=ARCHITECTURES[spec.architecture],
    )


def read_spec(file: GGUFFile) -> ModelSpec:
    """The file's ModelSpec. Raises UnsupportedModel naming what is not supported, ModelFormatError on bad sizes."""
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{file.path}: architecture {architecture!r:.80} is not supported ({known} are)")
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
        norm_eps=_positive(file, _key(file, "attention.layer_norm_rms_epsilon")),
        rope=_rope(file, head_dim),
        layers=(AttentionSpec(),) * _size(file, "block_count"),
        tied_output="output.weight" not in file.tensors,
        qk_norm=ARCHITECTURES[architecture],
    )
    if problem := spec.problems():
        raise ModelFormatError(f"{file.path}: {problem}")
    return spec


def _refuse_variants(file: GGUFFile) -> None:
    if not file.get(_key(file, "attention.causal"), bool, True):
        raise UnsupportedModel(f"{file.path}: attention that is not causal is not supported")
    if file.get(_key(file, "expert_count"), int, 0):
        raise UnsupportedModel(f"{file.path}: mixture-of-experts layers are not supported")
    window = _key(file, "attention.sliding_window")
    if (keys := file.get(window, int, 0)) and keys < _size(file, "context_length"):
        raise UnsupportedModel(f"{file.path}: a sliding window ({window} {keys}) is not supported in GGUF files")


def _rope(file: GGUFFile, head_dim: int) -> RopeSpec:
    dim = _size(file, "rope.dimension_count", head_dim)
    if ARCHITECTURES[file.get("general.architecture", str)] and dim != head_dim:
        key = _key(file, "rope.dimension_count")
        raise UnsupportedModel(f"{file.path}: {key} {dim}, not the head dimension {head_dim}, is not supported")
    theta = _positive(file, _key(file, "rope.freq_base"), 10000.0)
    # A factor with no type beside it means linear scaling, the only kind that older files know.
    kind = file.get(_key(file, "rope.scaling.type"), str, "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r:.80} is not supported (linear is)")
    attention = _key(file, "rope.scaling.attn_factor")
    if file.get(attention, float, 1.0) != 1.0:
        raise UnsupportedModel(f"{file.path}: RoPE scaling of attention ({attention}) is unsupported")
    factor = 1.0
    for key in (_key(file, "rope.scale_linear"), _key(file, "rope.scaling.factor")):
        # Writers put 0 for "no factor".
        if kind == "linear" and file.get(key, float, 0.0) != 0.0:
            factor = _positive(file, key)
    return RopeSpec(theta, dim, factor, _rope_factors(file, dim // 2))


def _rope_factors(file: GGUFFile, pairs: int) -> tuple[float, ...]:
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return ()
    if info.kind != "F32" or info.shape != (pairs,):
        raise ModelFormatError(
            f"{file.path}: tensor {ROPE_FACTORS} is {info.kind} of shape {info.shape}, expected F32 of ({pairs},)"
        )
    return tuple(float(factor) for factor in file.data(ROPE_FACTORS).view(np.float32))


def _key(file: GGUFFile, name: str) -> str:
    """A metadata key of the file's architecture."""
    return f"{file.get('general.architecture', str)}.{name}"


def _size(file: GGUFFile, name: str, default: int | None = None) -> int:
    key = _key(file, name)
    value = file.get(key, int) if default is None else file.get(key, int, default)
    if not 1 <= value <= LIMITS[name]:
        raise ModelFormatError(f"{file.path}: {key} must be between 1 and {LIMITS[name]}, not {value}")
    return value


def _positive(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.get(key, float) if default is None else file.get(key, float, default)
    least, most = NUMBERS
    if not least <= value <= most:
        raise ModelFormatError(f"{file.path}: {key} must be a positive number, {least:g} to {most:g}, not {value}")
    return value
