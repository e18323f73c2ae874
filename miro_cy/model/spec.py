"""ModelSpec: a decoder-only transformer described as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miro_cy.config import KVDtype

#: Bytes of an element, and of the scale that each token and KV head has for K, and one for V.
KV_BYTES: dict[KVDtype, int] = {"fp16": 2, "fp32": 4, "int8": 1, "bf16": 2}
KV_SCALE_BYTES: dict[KVDtype, int] = {"fp16": 0, "fp32": 0, "int8": 4, "bf16": 0}

#: The attention kernel keeps a KV group's queries in one work item.
MAX_GROUP = 64
MAX_HEAD_DIM = 512
#: What no sane checkpoint exceeds; bounds every size before anything is allocated.
SIZE_LIMITS = {
    "layers": 1024,
    "hidden": 1 << 17,
    "ffn": 1 << 20,
    "heads": 1 << 12,
    "head_dim": MAX_HEAD_DIM,
    "context": 1 << 24,
    "vocab": 1 << 24,
}


#: What a checkpoint's positive numbers (bases, factors, epsilons) may be: far from where float32 has none or infinity.
NUMBERS = (1e-12, 1e18)
#: Radians that no position may turn a pair by.
MAX_ANGLE = 1e30


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` dimensions of a head, on neighbouring pairs.

    factor: divides every position ("linear" scaling). factors: divide the frequency of each of the dim / 2 pairs
    ("llama3" scaling, and what GGUF files call rope_freqs); empty for none.
    """

    theta: float
    dim: int
    factor: float = 1.0
    factors: tuple[float, ...] = ()

    @property
    def scaling(self) -> str:
        """The scaling's name: "none", "linear", "factors", or both of the last two."""
        return "+".join([*["linear"] * (self.factor != 1), *["factors"] * bool(self.factors)]) or "none"

    def largest_angle(self, context: int) -> float:
        """More radians than any pair turns by at the last position."""
        return context * max(1.0, 1.0 / self.theta) / self.factor / min((1.0, *self.factors))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. window: keys a query sees, itself included (0: all); soft_cap: 0 for none."""

    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in elements; `layers` has one entry a layer. Biases are used where the weights hold them.

    qk_norm: an RMS norm over each head of q and k, before the rotary embedding.
    """

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
    qk_norm: bool = False

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kv_bytes_per_token(self, dtype: KVDtype) -> int:
        """Bytes of KV cache a token takes over all layers, as long as no window has passed it."""
        return self.n_layers * self.kv_bytes_per_layer(dtype)

    def kv_bytes_per_layer(self, dtype: KVDtype) -> int:
        """Bytes that a token takes in one layer: K and V of every KV head, padded as KVLayer does, and scales."""
        keys = -(-self.head_dim // 32) * 32 if dtype == "bf16" else self.head_dim
        elements = keys + -(-self.head_dim // 16) * 16
        return self.n_kv_heads * (elements * KV_BYTES[dtype] + 2 * KV_SCALE_BYTES[dtype])

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
        if not all(math.isfinite(f) and f > 0 for f in (self.rope.factor, *self.rope.factors)):
            return "a RoPE scaling factor is not a positive number"
        if self.rope.factors and len(self.rope.factors) != self.rope.dim // 2:
            return f"{len(self.rope.factors)} RoPE factors for {self.rope.dim // 2} pairs"
        if not self.rope.largest_angle(self.context) < MAX_ANGLE:
            return f"RoPE base {self.rope.theta:g} and scaling turn the last position by more than float32 holds"
        return None
