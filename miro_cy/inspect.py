"""What a model is and what it takes, from its headers: nothing is packed, no tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from miro_cy._kernels.weights import FORMATS, packed_nbytes
from miro_cy.config import Compute, EngineConfig, KVDtype
from miro_cy.errors import ConfigError
from miro_cy.hub import resolve
from miro_cy.loading import compute_mode, kv_dtype_of, tokenizer_of
from miro_cy.model.checkpoint import Checkpoint, Part
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.spec import KV_BYTES, ModelSpec
from miro_cy.model.weights import unsupported


@dataclass(frozen=True, slots=True)
class TypeShare:
    """What the tensors of one element type make up: how many, their elements, their bytes in the file."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one engine takes at a context: packed weights, KV cache, both. A step's buffers come on top."""

    weights: int
    kv: int
    total: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's description; the field names are those of `miro inspect --json`. Sizes in elements, memory in bytes.

    types: by element type, the largest share first. problem: why the model cannot be served, or None; then `memory` is
    empty. memory: by KV dtype, at `context` tokens; compute, kv_dtype: what the engine takes unless told otherwise.
    """

    name: str
    path: str
    format: str
    architecture: str
    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    rope_scaling: str
    tied_output: bool
    tokenizer: str
    tokenizer_supported: bool
    eos_ids: list[int]
    parameters: int
    bytes: int
    types: dict[str, TypeShare]
    problem: str | None
    kv_bytes_per_token: dict[str, int]
    context: int
    compute: Compute
    kv_dtype: KVDtype
    memory: dict[str, Memory]


def inspect_model(path_or_name: str | os.PathLike[str], context: int | None = None) -> ModelReport:
    """Describe a model by path or name, with its memory at a context (None: the largest it was made for).

    Raises ModelError as loading does, except that a tensor type miro cannot pack is reported as `problem`; ConfigError
    for a context the model was not made for.
    """
    with open_checkpoint(resolve(Path(path_or_name))) as checkpoint:
        spec = checkpoint.spec
        context = spec.context if context is None else context
        if not 1 <= context <= spec.context:
            raise ConfigError(
                f"context must be between 1 and the model's {spec.context}, not {context}", field="context"
            )
        return _report(checkpoint, context)


def _report(checkpoint: Checkpoint, context: int) -> ModelReport:
    spec, parts = checkpoint.spec, checkpoint.parts()
    tokenizer = tokenizer_of(checkpoint)
    problem = next(filter(None, map(unsupported, parts)), None)
    defaults = EngineConfig()
    quantised = any(part.is_matrix and part.tensor.kind not in ("F32", "F16", "BF16") for part in parts)
    compute = compute_mode(defaults, quantised=quantised)
    return ModelReport(
        name=checkpoint.name,
        path=str(checkpoint.path),
        format=checkpoint.format,
        architecture=spec.architecture,
        layers=spec.n_layers,
        hidden_size=spec.hidden_size,
        ffn_size=spec.ffn_size,
        heads=spec.n_heads,
        kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_context=spec.context,
        rope_theta=spec.rope.theta,
        rope_scaling=spec.rope.scaling,
        tied_output=spec.tied_output,
        tokenizer=tokenizer.kind,
        tokenizer_supported=tokenizer.supported,
        eos_ids=sorted(tokenizer.eos_ids),
        parameters=sum(prod(part.tensor.shape) for part in parts),
        bytes=sum(part.tensor.nbytes for part in parts),
        types=_types(parts),
        problem=problem,
        kv_bytes_per_token={dtype: spec.kv_bytes_per_token(dtype) for dtype in KV_BYTES},
        context=context,
        compute=compute,
        kv_dtype=kv_dtype_of(defaults, compute),
        memory={} if problem else _memory(spec, parts, context),
    )


def _types(parts: Iterable[Part]) -> dict[str, TypeShare]:
    found: dict[str, TypeShare] = {}
    for part in parts:
        share = found.get(part.tensor.kind, TypeShare(0, 0, 0))
        found[part.tensor.kind] = TypeShare(
            share.tensors + 1, share.parameters + prod(part.tensor.shape), share.bytes + part.tensor.nbytes
        )
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _memory(spec: ModelSpec, parts: Iterable[Part], context: int) -> dict[str, Memory]:
    weights = sum(_packed_bytes(part) for part in parts)
    block = EngineConfig().block_size
    tokens = -(-context // block) * block
    kv = {dtype: spec.kv_bytes_per_token(dtype) * tokens for dtype in KV_BYTES}
    return {dtype: Memory(weights, taken, weights + taken) for dtype, taken in kv.items()}


def _packed_bytes(part: Part) -> int:
    if part.is_matrix and part.tensor.kind in FORMATS:
        return packed_nbytes(part.tensor.kind, *part.tensor.shape)
    return 4 * prod(part.tensor.shape)
