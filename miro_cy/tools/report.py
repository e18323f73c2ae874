"""What `miro bench --json` prints: one BenchReport, to which the command adds `attention` and, when it compares,
`compare`. bench/README.md explains the fields to its readers.

A change of a field's meaning, or a field that goes, makes a new VERSION; a new field does not.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miro_cy.tools.cost import Cost
from miro_cy.tools.limits import Limits
from miro_cy.tools.load import LoadSample

FORMAT = "miro-bench"
VERSION = 1

Kind = Literal["prompt", "decode"]
Bound = Literal["compute", "bandwidth"]


@dataclass(frozen=True, slots=True)
class Machine:
    """cpus: those the process may run on. isa: the kernels' instruction-set level. threads: the engine's."""

    cpu: str
    cpus: int
    isa: str
    threads: int


@dataclass(frozen=True, slots=True)
class Model:
    """file_bytes: of its tensors in the file; packed_bytes: of its matrices in memory."""

    name: str
    format: str
    parameters: int
    layers: int
    file_bytes: int
    packed_bytes: int
    compute: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class Settings:
    """How it was measured: repetitions, tokens decoded a row, and the engine's settings."""

    repeat: int
    tokens: int
    context: int
    block_size: int
    max_step_tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Row:
    """One piece of work. Rates are those of the median repetition time.

    work: "prompt" (a prompt alone, up to and with its first token) or "decode" (steps in which every row gets one
    token). rows: sequences a step. depth: tokens of each sequence before the measured ones. tokens, steps: of one
    repetition, all rows together. gflops counts all operations alike; miro_cy/tools/cost.py says which,
    and which bytes gb_per_s counts. share_of_flops: the time that the operations would take at the measured peaks (of
    int8 dot products or tile registers for quantised weights that are multiplied so, of float32 multiply-adds for the
    rest) over the time they took.
    share_of_bandwidth: gb_per_s over the measured read_gb_per_s; above 1 where weights stay in a cache.
    bound: the limit that is nearer. profile: if asked for, seconds of the median repetition by part of the forward
    pass, and "rest" for what is outside of it (scheduling, sampling, text).
    """

    work: Kind
    rows: int
    depth: int
    tokens: int
    steps: int
    seconds: Spread
    tokens_per_second: float
    gflops: float
    gb_per_s: float
    share_of_flops: float
    share_of_bandwidth: float
    bound: Bound
    profile: dict[str, float] | None = None

    @classmethod
    def of(
        cls,
        kind: Kind,
        rows: int,
        depth: int,
        tokens: int,
        steps: int,
        seconds: Sequence[float],
        cost: Cost,
        at: Limits,
        *,
        tiles: bool = False,
    ) -> Row:
        """tiles: operations of quantised weights were made in tile registers."""
        spread = Spread.of(seconds)
        time = spread.median
        flops = (
            (cost.int8_ops / (at.tile_gflops if tiles else at.int8_gflops) + cost.float_ops / at.fma_gflops)
            / 1e9
            / time
        )
        bandwidth = cost.bytes / at.read_gb_per_s / 1e9 / time
        return cls(
            work=kind,
            rows=rows,
            depth=depth,
            tokens=tokens,
            steps=steps,
            seconds=spread,
            tokens_per_second=tokens / time,
            gflops=cost.ops / time / 1e9,
            gb_per_s=cost.bytes / time / 1e9,
            share_of_flops=flops,
            share_of_bandwidth=bandwidth,
            bound="compute" if flops > bandwidth else "bandwidth",
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Loading in processes of its own, the file in the page cache. seconds: of Engine.load; memory_bytes: resident
    after it, less what was after the imports; pool_bytes: of the KV pool, which memory_bytes leaves out.
    """

    seconds: Spread
    memory_bytes: Spread
    pool_bytes: int

    @classmethod
    def of(cls, samples: Sequence[LoadSample]) -> Load:
        return cls(
            Spread.of([sample.seconds for sample in samples]),
            Spread.of([sample.memory_bytes for sample in samples]),
            samples[-1].pool_bytes,
        )


@dataclass(slots=True, kw_only=True)
class BenchReport:
    """load: None unless asked for."""

    format: str = FORMAT
    format_version: int = VERSION
    miro: str
    machine: Machine
    model: Model
    settings: Settings
    limits: Limits
    rows: list[Row]
    load: Load | None = None


def this_machine(isa: str, threads: int) -> Machine:
    return Machine(_cpu_name(), len(os.sched_getaffinity(0)), isa, threads)


def _cpu_name() -> str:
    """What the system calls the first CPU, or at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.machine())
