"""What a model takes of the memory, by its headers: packed weights, step buffers, and what is left for KV blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from miro_cy._kernels.weights import FORMATS, packed_nbytes
from miro_cy.cache.windows import tokens_within
from miro_cy.config import EngineConfig, KVDtype
from miro_cy.errors import ConfigError, Unavailable
from miro_cy.model.checkpoint import Part
from miro_cy.model.kv_groups import kv_groups
from miro_cy.model.spec import ModelSpec
from miro_cy.model.step import buffer_bytes
from miro_cy.sched.budget import MIN_CHUNK
from miro_cy.sched.config import SchedulerConfig

#: A server's KV cache unless told otherwise: this many contexts, within this share of what is free.
SERVER_CONTEXTS = 4
SERVER_SHARE = 0.25
#: One context in-process, within this share.
SINGLE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for KV blocks. All in bytes, but block_size in tokens.

    total: all that may be taken, before the model is loaded. weights: packed. activations: a step's buffers and the
    rotary tables, for as many positions as fit. block: one KV block, of the layers of one group. windows: keys that a
    query of each layer group sees (0: all).
    """

    total: int
    weights: int
    activations: int
    block: int
    block_size: int
    windows: tuple[int, ...] = (0,)

    @property
    def left(self) -> int:
        """Bytes left for KV blocks; negative where not even the rest fits."""
        return self.total - self.weights - self.activations

    @property
    def blocks(self) -> int:
        """KV blocks that fit; none when not every layer group has one."""
        return self.left // self.block if self.left >= self.least else 0

    @property
    def least(self) -> int:
        """Bytes of a block in every layer group, without which nothing can be computed."""
        return self.block * len(self.windows)

    def tokens(self, blocks: int, limit: int) -> int:
        """The longest sequence, in tokens up to `limit`, that so many blocks have room for."""
        return tokens_within(self.windows, blocks, self.block_size, limit)

    def __str__(self) -> str:
        return (
            f"of {self.total:,} bytes the weights take {self.weights:,} and a step's buffers {self.activations:,}, "
            f"which leaves {self.left:,}; one block of {self.block_size} tokens takes {self.least:,}"
        )


def room_for(
    spec: ModelSpec,
    parts: Iterable[Part],
    config: EngineConfig,
    kv_dtype: KVDtype,
    *,
    threads: int,
    context: int,
    total: int,
) -> Room:
    """The room that `total` bytes have for a model with these settings, at most `context` tokens a sequence."""
    weights, buffers = packed_bytes(parts), step_bytes(spec, config, threads)
    block, windows = kv_block(spec, config, kv_dtype)
    room = Room(total, weights, buffers, block, config.block_size, windows)
    positions = min(context, max(max(0, room.left) * room.block_size // room.least, room.tokens(room.blocks, context)))
    return replace(room, activations=buffers + rope_bytes(spec, positions))


def kv_block(spec: ModelSpec, config: EngineConfig, kv_dtype: KVDtype) -> tuple[int, tuple[int, ...]]:
    """Bytes of one KV block, and the windows of the layer groups whose blocks the pool holds."""
    groups = kv_groups(spec)
    return groups.size * spec.kv_bytes_per_layer(kv_dtype) * config.block_size, groups.windows


def kv_blocks(room: Room, config: EngineConfig, context: int) -> int:
    """Blocks of the KV pool. Raises ConfigError, with the arithmetic, for a budget that is too small or too large."""
    if isinstance(config.kv_memory, int):
        if config.kv_memory < room.least:
            raise ConfigError(
                f"kv_memory is {config.kv_memory:,} bytes, one block of {room.block_size} tokens takes {room.least:,}",
                field="kv_memory",
            )
        if config.kv_memory > room.left:
            raise Unavailable(f"kv_memory is {config.kv_memory:,} bytes, but {room}", field="kv_memory")
        return min(config.kv_memory // room.block, 2**31 // room.block_size - 1)
    if not room.blocks:
        raise Unavailable(f"there is no room for a KV cache: {room}", field="kv_memory")
    contexts, share = (SERVER_CONTEXTS, SERVER_SHARE) if config.kv_memory == "auto" else (1, SINGLE_SHARE)
    # As if there were no windows: where they make a sequence small, many of them shall run.
    one_context = len(room.windows) * -(-context // room.block_size)
    return max(len(room.windows), min(one_context * contexts, int(room.left * share) // room.block))


def packed_bytes(parts: Iterable[Part]) -> int:
    """Bytes of the weights once packed."""
    return sum(_packed_bytes(part) for part in parts)


def step_bytes(spec: ModelSpec, config: EngineConfig, threads: int) -> int:
    """Bytes of the buffers of the largest step that the scheduler may plan."""
    rows = config.max_num_seqs
    tokens = max(config.max_step_tokens, rows - 1 + min(MIN_CHUNK, config.max_step_tokens))
    logits = min(tokens, rows + SchedulerConfig().max_score_tokens)
    return buffer_bytes(spec, threads=threads, max_tokens=tokens, max_logits=logits)


def rope_bytes(spec: ModelSpec, positions: int) -> int:
    """Bytes of the rotary tables up to a position: float32 cosines and sines of each pair."""
    return 4 * spec.rope.dim * positions


def is_quantised(parts: Iterable[Part]) -> bool:
    """Whether any matrix is stored in fewer than 16 bits a value."""
    return any(part.is_matrix and part.tensor.kind not in ("F32", "F16", "BF16") for part in parts)


def has_halves(parts: Iterable[Part]) -> bool:
    """Whether any matrix is stored in 16 bits a value."""
    return any(part.is_matrix and part.tensor.kind in ("F16", "BF16") for part in parts)


def _packed_bytes(part: Part) -> int:
    if part.is_matrix and part.tensor.kind in FORMATS:
        return packed_nbytes(part.tensor.kind, *part.tensor.shape)
    return 4 * prod(part.tensor.shape)
