"""From a path or name to the parts of an engine: checkpoint, weights, pool, scheduler, executor."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import miro_cy
from miro_cy._kernels.select import has_tiles
from miro_cy.batch import BatchView  # noqa: F401  (loads the extension before the scheduler cimports it)
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.cache.windows import tokens_within
from miro_cy.config import Compute, EngineConfig, KVDtype, check_kv_dtype
from miro_cy.core import EngineCore
from miro_cy.errors import ConfigError, ModelFormatError
from miro_cy.formats.gguf import GGUFFile
from miro_cy.hub import resolve
from miro_cy.machine import available_memory, default_threads, trim_heap
from miro_cy.memory import has_halves, is_quantised, kv_blocks, room_for
from miro_cy.model.checkpoint import Checkpoint
from miro_cy.model.executor import CpuExecutor
from miro_cy.model.generation import GenerationDefaults
from miro_cy.model.kv_groups import kv_groups
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.spec import ModelSpec
from miro_cy.model.weights import Weights, load_weights, packable_parts
from miro_cy.sampling.params import MAX_CHOICES
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig
from miro_cy.text import Tokenizer, load_tokenizer

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Parts:
    """What `load_parts` built. context: most tokens of a sequence; capacity: tokens that the pool holds."""

    core: EngineCore
    scheduler: Scheduler
    executor: CpuExecutor
    tokenizer: Tokenizer
    spec: ModelSpec
    generation: GenerationDefaults
    config: EngineConfig
    name: str
    context: int
    capacity: int
    kv_dtype: KVDtype
    isa: str
    fingerprint: str

    def describe(self) -> dict[str, Any]:
        """What is served, for whoever asks from outside: names, sizes, settings, as JSON takes them."""
        spec, executor = self.spec, self.executor
        return {
            "name": self.name,
            "context": self.context,
            "fingerprint": self.fingerprint,
            "architecture": spec.architecture,
            "vocab_size": spec.vocab_size,
            "layers": spec.n_layers,
            "compute": executor.compute,
            "kv_dtype": self.kv_dtype,
            "block_size": self.config.block_size,
            "capacity": self.capacity,
            "kv_bytes_per_token": spec.kv_bytes_per_token(self.kv_dtype),
            "weight_bytes": executor.weights.nbytes,
            "threads": executor.threads,
            "isa": self.isa,
            "text": self.tokenizer.supported,
            "chat": self.tokenizer.has_template,
            "sampling": dict(self.generation.sampling),
        }


#: The process whose OpenMP threads have run; they do not survive a fork, and the child would wait for them for ever.
_team_pid: int | None = None


def _claim_threads(threads: int) -> None:
    """Raise ConfigError in a process forked from one that computed with several threads."""
    global _team_pid
    if threads > 1 and _team_pid not in (None, os.getpid()):
        raise ConfigError(
            "this process was forked from one that had loaded a model: start it with 'spawn', or use threads=1",
            field="threads",
        )
    if threads > 1:
        _team_pid = os.getpid()


def load_parts(path_or_name: str | Path, config: EngineConfig, progress: Progress | None = None) -> Parts:
    """Load a model and everything that serves it. Raises ModelError or ConfigError."""
    path = resolve(path_or_name)
    with open_checkpoint(path) as checkpoint:
        context = _context(checkpoint.spec, config)
        tokenizer = tokenizer_of(checkpoint)
        _check_vocabulary(path, tokenizer, checkpoint.spec)
        digest = _digest(checkpoint.source.files)
        threads = config.threads or default_threads()
        _claim_threads(threads)
        trim_heap()
        plan = _plan(checkpoint, config, threads, context)
        weights = load_weights(checkpoint, threads=threads, progress=progress)
        return _assemble(checkpoint, weights, tokenizer, config, plan, digest)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer beside a model's weights. A folder without one serves token ids only."""
    if isinstance(checkpoint.source, GGUFFile):
        return load_tokenizer(checkpoint.source)
    return load_tokenizer(checkpoint.path)


#: Up to so many sequences at once, steps of an engine take less time without tile registers.
FEW_SEQUENCES = 4
#: What an engine's KV cache is of, unless it is told.
KV_DTYPE: dict[Compute, KVDtype] = {"fast": "fp16", "bf16": "bf16", "exact": "fp32"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided before anything is packed. context: most tokens of a sequence."""

    threads: int
    context: int
    compute: Compute
    tiles: bool
    kv_dtype: KVDtype
    n_blocks: int


def _plan(checkpoint: Checkpoint, config: EngineConfig, threads: int, context: int) -> Plan:
    """Raises before any work is done for a model that cannot be packed, or for which there is no memory."""
    parts = packable_parts(checkpoint)
    compute = compute_mode(config, quantised=is_quantised(parts))
    kv_dtype = kv_dtype_of(config, compute)
    room = room_for(
        checkpoint.spec, parts, config, kv_dtype, threads=threads, context=context, total=available_memory()
    )
    tiles = compute == "bf16" or (compute == "exact" and has_halves(parts) and tiles_pay(config))
    return Plan(threads, context, compute, tiles, kv_dtype, kv_blocks(room, config, context))


def _assemble(
    checkpoint: Checkpoint, weights: Weights, tokenizer: Tokenizer, config: EngineConfig, plan: Plan, digest: str
) -> Parts:
    spec, n_blocks = checkpoint.spec, plan.n_blocks
    index = PrefixIndex(n_blocks, config.block_size) if config.prefix_cache else None
    pool = BlockPool(n_blocks, config.block_size, index)
    windows = kv_groups(spec).windows
    context = tokens_within(windows, n_blocks, config.block_size, plan.context)
    width = -(-context // config.block_size)
    tables = BlockTables(len(windows), config.max_num_seqs, width, windows)
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        step_ms=config.step_ms,
        max_waiting=config.max_waiting,
        max_choices=MAX_CHOICES,
        policy=config.policy,
        ageing_ms=config.ageing_ms,
        admission=config.admission,
        watermark=config.watermark,
    )
    scheduler = Scheduler(pool, tables, limits, max_context=context, clock=time.monotonic)
    executor = CpuExecutor(
        spec,
        weights,
        n_blocks=n_blocks,
        block_size=config.block_size,
        kv_dtype=plan.kv_dtype,
        fast=plan.compute != "exact",
        tiles=plan.tiles,
        threads=plan.threads,
        max_tokens=scheduler.view.max_tokens,
        context=context,
        touch=config.kv_memory is not None,
    )
    core = EngineCore(executor, scheduler, pool, tokenizer, time.monotonic)
    fingerprint = f"{digest}-{plan.compute}-{plan.kv_dtype}-{executor.isa}-{miro_cy.__version__}"
    capacity = n_blocks // len(windows) * config.block_size
    return Parts(
        core=core,
        scheduler=scheduler,
        executor=executor,
        tokenizer=tokenizer,
        spec=spec,
        generation=checkpoint.generation,
        config=config,
        name=checkpoint.name,
        context=context,
        capacity=capacity,
        kv_dtype=plan.kv_dtype,
        isa=executor.isa,
        fingerprint=fingerprint,
    )


def _check_vocabulary(path: Path, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Text must not become ids that the model has no row for."""
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelFormatError(
            f"{path}: the vocabulary has {tokenizer.vocab_size} tokens, the embedding only {spec.vocab_size} rows"
        )


def compute_mode(config: EngineConfig, *, quantised: bool) -> Compute:
    """The arithmetic of a model whose weights are quantised or not. Raises ConfigError for what the machine lacks."""
    if config.compute == "bf16" and not has_tiles():
        raise ConfigError(
            "compute 'bf16' needs tile registers (Intel AMX): this machine has none, or MIRO_ISA asks for less",
            field="compute",
        )
    if config.compute is not None:
        return config.compute
    if not quantised:
        return "exact"
    return "bf16" if tiles_pay(config) else "fast"


def tiles_pay(config: EngineConfig) -> bool:
    """Whether an engine of so many sequences gains by tile registers, and the machine has them."""
    return has_tiles() and config.max_num_seqs > FEW_SEQUENCES


def kv_dtype_of(config: EngineConfig, compute: Compute) -> KVDtype:
    """The KV cache's element type. Raises ConfigError where it contradicts the compute mode."""
    check_kv_dtype(config.kv_dtype, compute)
    return config.kv_dtype or KV_DTYPE[compute]


def _context(spec: ModelSpec, config: EngineConfig) -> int:
    if config.max_context is None:
        return spec.context
    if config.max_context > spec.context:
        raise ConfigError(
            f"max_context is {config.max_context}, the model was made for {spec.context} tokens", field="max_context"
        )
    return config.max_context


def _digest(paths: Sequence[Path]) -> str:
    """Identifies a checkpoint without reading all of it: of each file the size, first and last MiB, and 64 pages."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(2**20))
        for i in range(1, 65):
            file.seek(size * i // 65)
            digest.update(file.read(4096))
        file.seek(max(0, size - 2**20))
        digest.update(file.read(2**20))
