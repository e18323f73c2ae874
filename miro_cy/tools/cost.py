"""What a step must compute and read, from the model's sizes and the step's rows.

Counted are the matrix products and attention, and the bytes of weights and KV cache that they need at least once:

    operations  2 for each weight a token is multiplied by (the output matrix for tokens whose logits are wanted only),
                4 * keys * heads * head_dim a layer and token in attention; a multiplication and an addition are two
    bytes       the packed weights, once a step however many rows share them; the keys and values each row looks at

Left out are norms, rotary embedding, softmax, sampling, the rows of the embedding, activations, and KV writes: each is
small beside these. So the shares of a limit are what a perfect program would still have to do, and never too high.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miro_cy._kernels.weights import PackedWeights
from miro_cy.config import KVDtype
from miro_cy.model.spec import ModelSpec
from miro_cy.model.weights import Weights

#: A row of a step: first position, tokens, logits rows.
StepRow = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Cost:
    """int8_ops are made of int8 multiplications, or of bfloat16 ones in tiles; float_ops of float32 ones."""

    int8_ops: float = 0.0
    float_ops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.int8_ops + other.int8_ops, self.float_ops + other.float_ops, self.bytes + other.bytes)

    @property
    def ops(self) -> float:
        return self.int8_ops + self.float_ops


class CostModel:
    """The costs of one loaded model. fast: quantised weights are multiplied by rounded activations."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, fast: bool, kv_dtype: KVDtype) -> None:
        self._windows = [layer.window for layer in spec.layers]
        self._attention_ops = 4 * spec.n_heads * spec.head_dim
        self._kv_bytes = spec.kv_bytes_per_token(kv_dtype) / spec.n_layers
        matrices = [matrix for layer in weights.layers for matrix in layer.matrices.values()]
        self._token = [_matmul_ops(matrices, integers=flag, fast=fast) for flag in (True, False)]
        self._logits = [_matmul_ops([weights.output], integers=flag, fast=fast) for flag in (True, False)]
        self._layer_bytes = sum(matrix.nbytes for matrix in matrices)
        self._output_bytes = weights.output.nbytes

    def step(self, rows: Iterable[StepRow]) -> Cost:
        """The cost of one step over these rows."""
        tokens = logits = 0
        attention = kv = 0.0
        for first, n_tok, n_log in rows:
            tokens += n_tok
            logits += n_log
            for window in self._windows:
                attention += self._attention_ops * _keys(first, n_tok, window)
                kv += self._kv_bytes * (min(first + n_tok, window + n_tok - 1) if window else first + n_tok)
        integers, floats = (tokens * a + logits * b for a, b in zip(self._token, self._logits, strict=True))
        weights = self._layer_bytes + (self._output_bytes if logits else 0)
        return Cost(integers, floats + attention, weights + kv)


def _matmul_ops(matrices: Iterable[PackedWeights], *, integers: bool, fast: bool) -> int:
    """Operations a row of those matrices that are multiplied in integers, or of those that are not."""
    return sum(2 * m.shape[0] * m.shape[1] for m in matrices if (fast and not m.is_float) == integers)


def _keys(first: int, n_tok: int, window: int) -> int:
    """Keys that the tokens at first.. see together; window 0: all before them, and themselves."""
    if window:
        return sum(min(position + 1, window) for position in range(first, first + n_tok))
    return n_tok * first + n_tok * (n_tok + 1) // 2
