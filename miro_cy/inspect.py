"""What a model is and what it takes, from its headers: nothing is packed, no tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from miro_client.checks import check_int
from miro_cy._kernels.select import has_tiles
from miro_cy.cache.windows import blocks_needed
from miro_cy.config import Compute, EngineConfig, KVDtype, parse_bytes
from miro_cy.errors import ConfigError
from miro_cy.hub import resolve
from miro_cy.loading import compute_mode, kv_dtype_of, tokenizer_of
from miro_cy.machine import available_memory, default_threads
from miro_cy.memory import Room, is_quantised, kv_block, kv_blocks, packed_bytes, room_for, rope_bytes, step_bytes
from miro_cy.model.checkpoint import Checkpoint, Part
from miro_cy.model.kv_groups import kv_groups
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
class LayerGroup:
    """Layers that share KV blocks. window: tokens that each of them sees, its own included; 0: all."""

    layers: int
    window: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one engine takes at a context. weights: packed; activations: a step's buffers and rotary tables.

    kv: of one sequence, in whole blocks, of which layers with a window keep only the last. kv_full: what that would be
    if all layers saw all tokens.
    """

    weights: int
    activations: int
    kv: int
    kv_full: int
    total: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What `total` bytes have room for beside the weights and a step's buffers.

    left: bytes for the KV cache. tokens: those it holds in all layers, in whole blocks. context: most tokens of one
    sequence then, up to those asked for. sequences: of so many tokens, that it holds at once; of each, layers with a
    window keep only the last ones.
    """

    total: int
    weights: int
    activations: int
    left: int
    tokens: int
    context: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens that the KV cache would hold in all layers on this machine, as it is now, with default settings: a
    worker's, and that of an engine in a program of one's own. 0 where there is no room.

    worker_sequences, engine_sequences: as many of the report's `context` tokens each as they hold at once.
    """

    worker: int
    engine: int
    worker_sequences: int
    engine_sequences: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's description; the field names are those of `miro inspect --json`. Sizes in elements, memory in bytes.

    types: by element type, the largest share first. problem: why the model cannot be served, or None; then `memory` and
    `capacity` are empty. kv_groups: all layers, those that see all tokens first. memory: by KV dtype, at `context`
    tokens; compute, kv_dtype: what the engine takes unless told otherwise. available: what this process may take of the
    machine's memory now. capacity: by KV dtype, what the default shares of that hold. fit: by KV dtype, what a given
    size has room for if no sequence is longer than `context`; empty where none was given or the model cannot be served.
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
    kv_groups: list[LayerGroup]
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

    fit: bytes, or text such as "24GiB", whose room for a KV cache is worked out, for sequences of up to that context.
    Buffers are those of the default settings. Raises ModelError as loading does, except that a tensor type miro cannot
    pack is reported as `problem`; ConfigError for a context the model was not made for, and for a `fit` that is no size
    or has not even room for a KV block of any type.
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
        kv_bytes_per_token={dtype: spec.kv_bytes_per_token(dtype) for dtype in _kv_dtypes()},
        kv_groups=_groups(spec),
        context=context,
        compute=compute,
        kv_dtype=kv_dtype_of(defaults, compute),
        memory={} if problem else _memory(spec, parts, context),
        available=available,
        capacity={} if problem else _capacity(spec, parts, context, available),
        fit={} if problem or total is None else _fit(spec, parts, context, total),
    )


def _kv_dtypes() -> tuple[KVDtype, ...]:
    """Those that an engine on this machine may have."""
    return tuple(dtype for dtype in KV_BYTES if dtype != "bf16" or has_tiles())


def _groups(spec: ModelSpec) -> list[LayerGroup]:
    groups = kv_groups(spec)
    return [LayerGroup(len(layers), window) for layers, window in zip(groups.layers, groups.windows, strict=True)]


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
    memory: dict[str, Memory] = {}
    for dtype in _kv_dtypes():
        block, windows = kv_block(spec, defaults, dtype)
        kv = block * blocks_needed(windows, context, defaults.block_size)
        full = spec.kv_bytes_per_token(dtype) * defaults.block_size * blocks_needed((0,), context, defaults.block_size)
        memory[dtype] = Memory(weights, activations, kv, full, weights + activations + kv)
    return memory


def _rooms(spec: ModelSpec, parts: list[Part], context: int, total: int) -> dict[str, Room]:
    """The room that `total` bytes have, by KV dtype, with default settings but for the longest sequence."""
    defaults, threads = EngineConfig(), default_threads()
    return {
        dtype: room_for(spec, parts, defaults, dtype, threads=threads, context=context, total=total)
        for dtype in _kv_dtypes()
    }


def _sequences(room: Room, blocks: int, context: int) -> int:
    """Sequences of `context` tokens that so many blocks hold at once."""
    return blocks // blocks_needed(room.windows, context, room.block_size)


def _capacity(spec: ModelSpec, parts: list[Part], context: int, available: int) -> dict[str, Capacity]:
    def blocks(room: Room, config: EngineConfig) -> int:
        return kv_blocks(room, config, spec.context) if room.blocks else 0

    def capacity(room: Room) -> Capacity:
        server, single = blocks(room, EngineConfig(kv_memory="auto")), blocks(room, EngineConfig())
        tokens = [n // len(room.windows) * room.block_size for n in (server, single)]
        return Capacity(*tokens, *(_sequences(room, n, context) for n in (server, single)))

    return {dtype: capacity(room) for dtype, room in _rooms(spec, parts, spec.context, available).items()}


def _fit(spec: ModelSpec, parts: list[Part], context: int, total: int) -> dict[str, Fit]:
    rooms = _rooms(spec, parts, context, total)
    if not any(room.blocks for room in rooms.values()):
        raise ConfigError(f"fit is too small: {min(rooms.values(), key=lambda room: room.block)}", field="fit")
    return {dtype: _fit_of(room, context) for dtype, room in rooms.items()}


def _fit_of(room: Room, context: int) -> Fit:
    tokens = room.blocks // len(room.windows) * room.block_size
    longest = room.tokens(room.blocks, context)
    sequences = _sequences(room, room.blocks, longest) if longest else 0
    return Fit(room.total, room.weights, room.activations, max(0, room.left), tokens, longest, sequences)
