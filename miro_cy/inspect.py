"""What a model is and what it takes, from its headers: nothing is packed, no tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from miro_client.checks import check_int
from miro_cy.cache.windows import blocks_needed
from miro_cy.config import Compute, EngineConfig, KVDtype, parse_bytes
from miro_cy.errors import ConfigError
from miro_cy.hub import resolve
from miro_cy.loading import compute_mode, kv_dtype_of, tokenizer_of
from miro_cy.machine import available_memory, default_threads
from miro_cy.memory import Room, is_quantised, kv_block, kv_blocks, packed_bytes, room_for, rope_bytes, step_bytes
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
    """Bytes that one engine takes at a context. weights: packed; activations: a step's buffers and rotary tables."""

    weights: int
    activations: int
    kv: int
    total: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What `total` bytes have room for beside the weights and a step's buffers.

    left: bytes for the KV cache. tokens: those it holds in all layers, in whole blocks. context: most tokens of one
    sequence then, of which layers with a window hold only the last.
    """

    total: int
    weights: int
    activations: int
    left: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens that the KV cache would hold on this machine, as it is now, with default settings: a worker's, and that of
    an engine in a program of one's own. 0 where there is no room.
    """

    worker: int
    engine: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's description; the field names are those of `miro inspect --json`. Sizes in elements, memory in bytes.

    types: by element type, the largest share first. problem: why the model cannot be served, or None; then `memory` and
    `capacity` are empty. memory: by KV dtype, at `context` tokens; compute, kv_dtype: what the engine takes unless told
    otherwise. available: what this process may take of the machine's memory now. capacity: by KV dtype, what the
    default shares of that hold. fit: by KV dtype, what a given size has room for; empty where none was given or the
    model cannot be served.
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
    available: int
    capacity: dict[str, Capacity]
    fit: dict[str, Fit]


def inspect_model(
    path_or_name: str | os.PathLike[str], context: int | None = None, fit: int | str | None = None
) -> ModelReport:
    """Describe a model by path or name, with its memory at a context (None: the largest it was made for).

    fit: bytes, or text such as "24GiB", whose room for a KV cache is worked out. Buffers are those of the default
    settings. Raises ModelError as loading does, except that a tensor type miro cannot pack is reported as `problem`;
    ConfigError for a context the model was not made for, and for a `fit` that is no size or has not even room for a
    KV block of any type.
    """
    total = None if fit is None else parse_bytes(fit, "fit")
    with open_checkpoint(resolve(Path(path_or_name))) as checkpoint:
        spec = checkpoint.spec
        context = spec.context if context is None else context
        check_int("context", context, 1, spec.context)
        return _report(checkpoint, context, total)


def _report(checkpoint: Checkpoint, context: int, total: int | None) -> ModelReport:
    spec, parts = checkpoint.spec, checkpoint.parts()
    tokenizer = tokenizer_of(checkpoint)
    problem = next(filter(None, map(unsupported, parts)), None)
    defaults = EngineConfig()
    compute = compute_mode(defaults, quantised=is_quantised(parts))
    available = available_memory()
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
        available=available,
        capacity={} if problem else _capacity(spec, parts, available),
        fit={} if problem or total is None else _fit(spec, parts, total),
    )


def _types(parts: Iterable[Part]) -> dict[str, TypeShare]:
    found: dict[str, TypeShare] = {}
    for part in parts:
        share = found.get(part.tensor.kind, TypeShare(0, 0, 0))
        found[part.tensor.kind] = TypeShare(
            share.tensors + 1, share.parameters + prod(part.tensor.shape), share.bytes + part.tensor.nbytes
        )
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _memory(spec: ModelSpec, parts: list[Part], context: int) -> dict[str, Memory]:
    defaults = EngineConfig()
    weights = packed_bytes(parts)
    activations = step_bytes(spec, defaults, default_threads()) + rope_bytes(spec, context)
    kv = {}
    for dtype in KV_BYTES:
        block, windows = kv_block(spec, defaults, dtype)
        kv[dtype] = block * blocks_needed(windows, context, defaults.block_size)
    return {dtype: Memory(weights, activations, n, weights + activations + n) for dtype, n in kv.items()}


def _rooms(spec: ModelSpec, parts: list[Part], total: int) -> dict[str, Room]:
    """The room that `total` bytes have, by KV dtype, with default settings."""
    defaults, threads = EngineConfig(), default_threads()
    return {
        dtype: room_for(spec, parts, defaults, dtype, threads=threads, context=spec.context, total=total)
        for dtype in KV_BYTES
    }


def _capacity(spec: ModelSpec, parts: list[Part], available: int) -> dict[str, Capacity]:
    def tokens(room: Room, config: EngineConfig) -> int:
        return kv_blocks(room, config, spec.context) // len(room.windows) * room.block_size if room.blocks else 0

    server, single = EngineConfig(kv_memory="auto"), EngineConfig()
    rooms = _rooms(spec, parts, available)
    return {dtype: Capacity(tokens(room, server), tokens(room, single)) for dtype, room in rooms.items()}


def _fit(spec: ModelSpec, parts: list[Part], total: int) -> dict[str, Fit]:
    rooms = _rooms(spec, parts, total)
    if not any(room.blocks for room in rooms.values()):
        raise ConfigError(f"fit is too small: {min(rooms.values(), key=lambda room: room.block)}", field="fit")
    return {dtype: _fit_of(room, spec.context) for dtype, room in rooms.items()}


def _fit_of(room: Room, context: int) -> Fit:
    tokens = room.blocks // len(room.windows) * room.block_size
    longest = room.tokens(room.blocks, context)
    return Fit(room.total, room.weights, room.activations, max(0, room.left), tokens, longest)
