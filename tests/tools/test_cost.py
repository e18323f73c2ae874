"""The operations and bytes of a step, against sums written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from miro_cy.model.opening import open_checkpoint
from miro_cy.model.spec import AttentionSpec, ModelSpec
from miro_cy.model.weights import Weights, load_weights
from miro_cy.tools.cost import Cost, CostModel


def opened(path: Path) -> tuple[ModelSpec, Weights]:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.spec, load_weights(checkpoint)


def parameters(spec: ModelSpec) -> int:
    """Weights that each token of a llama is multiplied by, without the output matrix."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    return spec.n_layers * (attention + 3 * spec.hidden_size * spec.ffn_size)


@pytest.mark.parametrize(("name", "fast"), [("hf/llama", False), ("gguf/Q4_1.gguf", True), ("gguf/Q4_1.gguf", False)])
def test_a_step(golden: Callable[[str], Path], name: str, fast: bool) -> None:
    spec, weights = opened(golden(name))
    model = CostModel(spec, weights, fast=fast, kv_dtype="fp16")
    # A row that decodes at position 9, and a chunk of three tokens at 4 whose prompt does not end here.
    cost = model.step([(9, 1, 1), (4, 3, 0)])
    matmuls = 2 * (4 * parameters(spec) + spec.vocab_size * spec.hidden_size)
    attention = 4 * spec.n_layers * spec.n_heads * spec.head_dim * (10 + 5 + 6 + 7)
    assert cost.ops == matmuls + attention
    assert cost.int8_ops == (matmuls if fast else 0)
    read = sum(matrix.nbytes for layer in weights.layers for matrix in layer.matrices.values()) + weights.output.nbytes
    assert cost.bytes == read + (10 + 7) * 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * 2


def test_rows_share_weights_and_without_logits_the_output_is_not_read(golden: Callable[[str], Path]) -> None:
    spec, weights = opened(golden("gguf/Q4_1.gguf"))
    model = CostModel(spec, weights, fast=True, kv_dtype="fp32")
    one, two, silent = (model.step(rows) for rows in ([(5, 1, 1)], [(5, 1, 1)] * 2, [(5, 1, 0)]))
    kv = 6 * spec.kv_bytes_per_token("fp32")
    assert two.ops == 2 * one.ops
    assert two.bytes - one.bytes == kv
    assert one.bytes - silent.bytes == weights.output.nbytes
    assert one + one == Cost(2 * one.int8_ops, 2 * one.float_ops, 2 * one.bytes)


def test_chunks_of_a_prompt_cost_what_the_whole_does_but_for_reading_again(golden: Callable[[str], Path]) -> None:
    spec, weights = opened(golden("gguf/Q4_1.gguf"))
    model = CostModel(spec, weights, fast=True, kv_dtype="fp16")
    whole = model.step([(0, 20, 1)])
    parts = model.step([(0, 13, 0)]) + model.step([(13, 7, 1)])
    assert (parts.int8_ops, parts.float_ops) == (whole.int8_ops, whole.float_ops)
    assert parts.bytes > whole.bytes


def test_a_window_bounds_the_keys(golden: Callable[[str], Path]) -> None:
    spec, weights = opened(golden("gguf/Q4_1.gguf"))
    layers = (AttentionSpec(window=4), *spec.layers[1:])
    full = CostModel(spec, weights, fast=True, kv_dtype="fp16")
    local = CostModel(replace(spec, layers=layers), weights, fast=True, kv_dtype="fp16")
    rows = [(2, 5, 1)]  # sees 3, 4, 5, 6, 7 keys, or 3, 4, 4, 4, 4
    a_key = 4 * spec.n_heads * spec.head_dim
    assert full.step(rows).float_ops - local.step(rows).float_ops == 6 * a_key
    kv_bytes = spec.kv_bytes_per_token("fp16") / spec.n_layers
    assert full.step([(9, 1, 1)]).bytes - local.step([(9, 1, 1)]).bytes == (10 - 4) * kv_bytes
