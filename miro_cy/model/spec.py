"""ModelSpec: a decoder-only transformer described as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["fp16", "fp32"]
KV_BYTES: dict[KVDtype, int] = {"fp16": 2, "fp32": 4}

#: The attention kernel keeps a KV group's queries in one work item.
MAX_GROUP = 64
MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` dimensions of a head, on neighbouring pairs."""

    theta: float
    dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. window: keys a query sees, itself included (0: all); soft_cap: 0 for none."""

    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in elements; `layers` has one entry a layer. Biases are used where the weights hold them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    context: int
    norm_eps: float
    rope: RopeSpec
    layers: tuple[AttentionSpec, ...]
    tied_output: bool

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kv_bytes_per_token(self, dtype: KVDtype) -> int:
        """Bytes of KV cache a token takes over all layers: K and V, every KV head."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * KV_BYTES[dtype]

    def problems(self) -> str | None:
        """What makes these sizes impossible or unsupported, or None."""
        if self.n_heads % self.n_kv_heads:
            return f"{self.n_heads} heads cannot share {self.n_kv_heads} KV heads"
        if self.n_heads // self.n_kv_heads > MAX_GROUP:
            return f"more than {MAX_GROUP} heads a KV head"
        if self.head_dim > MAX_HEAD_DIM:
            return f"head dimension {self.head_dim} is over {MAX_HEAD_DIM}"
        if self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim:
            return f"rotary dimension {self.rope.dim} does not fit head dimension {self.head_dim}"
        return None
