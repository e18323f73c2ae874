"""How fast a model runs on this machine, by the engine's own steps, beside what the machine could do.

Each repetition goes through all works, the limits being measured before each, so that a machine whose speed drifts
drifts for both. A prompt's time is that of its steps; a decode's that of `tokens` steps which carry nothing but its
rows. Prompts are random token ids, never the same twice. Settings differ from a server's in one thing: step_ms is so
long that a prompt goes through in the largest chunks the engine takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import miro_cy
from miro_cy._kernels.select import active_isa
from miro_cy.config import EngineConfig
from miro_cy.engine import Engine
from miro_cy.errors import ConfigError, InternalError, Unavailable
from miro_cy.hub import resolve
from miro_cy.inspect import ModelReport, inspect_model
from miro_cy.loading import Parts, compute_mode, kv_dtype_of, load_parts
from miro_cy.machine import available_memory
from miro_cy.requests import Event, Request
from miro_cy.sampling.params import SamplingParams
from miro_cy.tools.cost import Cost, CostModel, StepRow
from miro_cy.tools.limits import LimitProbe
from miro_cy.tools.report import BenchReport, Kind, Model, Row, Settings, this_machine

#: Seconds, from any start.
Clock = Callable[[], float]
#: progress(done, total, what is being done)
Progress = Callable[[int, int, str], None]

DEFAULT_PROMPT = 512
#: More rows than this would leave prompts no room in a step.
MAX_ROWS = 256
MAX_TOKENS = 2**16
MAX_REPEAT = 1000
#: The longest that EngineConfig takes: no prompt chunk is cut to keep a stream going.
STEP_MS = 60_000.0
#: Prompt tokens after which the engine knows what a prompt token costs; before, it takes small chunks.
FIRST_PROMPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure. prompts: their lengths (empty: DEFAULT_PROMPT, or what the context holds); rows: how many
    sequences decode at once; depths: tokens that each of them has before; tokens: steps timed; repeat: repetitions;
    profile: tell where the time of a step goes.

    Raises ConfigError naming the field when a value is out of range.
    """

    prompts: tuple[int, ...] = ()
    rows: tuple[int, ...] = (1, 8, 32)
    depths: tuple[int, ...] = (32,)
    tokens: int = 32
    repeat: int = 3
    profile: bool = False

    def __post_init__(self) -> None:
        for name, values, high in (
            ("prompt", self.prompts, 2**24),
            ("rows", self.rows, MAX_ROWS),
            ("depth", self.depths, 2**24),
            ("tokens", (self.tokens,), MAX_TOKENS),
            ("repeat", (self.repeat,), MAX_REPEAT),
        ):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                    raise ConfigError(f"{name} must be an integer between 1 and {high}, not {value!r:.80}", field=name)
        if not self.rows or not self.depths:
            raise ConfigError("rows and depths need at least one number each", field="rows")

    def works(self, context: int) -> list[Work]:
        """The works, prompts first. Raises ConfigError for one that the context does not hold."""
        prompts = self.prompts or (min(DEFAULT_PROMPT, context - 1),)
        works = [Work("prompt", 1, 0, n) for n in prompts]
        works += [Work("decode", rows, depth, self.tokens) for depth in self.depths for rows in self.rows]
        for work in works:
            if work.room > context:
                name = "prompt" if work.kind == "prompt" else "depth"
                raise ConfigError(f"{work} needs a context of {work.room} tokens, this is {context}", field=name)
        return list(dict.fromkeys(works))


@dataclass(frozen=True, slots=True)
class Work:
    """tokens: of the prompt, or of each row. depth: prompt of each row, 0 for a prompt."""

    kind: Kind
    rows: int
    depth: int
    tokens: int

    def __str__(self) -> str:
        if self.kind == "prompt":
            return f"prompt of {self.tokens}"
        return f"decode of {self.rows} row{'s' * (self.rows > 1)} at {self.depth}"

    @property
    def max_new(self) -> int:
        """Tokens that a sequence may generate: also those of steps in which other rows still have a prompt."""
        if self.kind == "prompt":
            return 1
        return self.tokens + 2 + -(-self.rows * self.depth // (EngineConfig().max_step_tokens - self.rows))

    @property
    def room(self) -> int:
        """Tokens of a sequence."""
        return self.max_new + (self.tokens if self.kind == "prompt" else self.depth)


@dataclass(slots=True)
class Sample:
    """One repetition: the seconds of its steps, where they went, and what the steps computed."""

    seconds: float = 0.0
    steps: list[list[StepRow]] = field(default_factory=list)
    parts: dict[str, float] | None = None


def run_bench(
    model: str | os.PathLike[str],
    plan: BenchPlan | None = None,
    *,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    **settings: Any,
) -> BenchReport:
    """Measure a model by path or name. settings: threads, compute, kv_dtype, max_context of EngineConfig.

    clock: what steps are timed with. Beside the model it takes a quarter of the free memory, at most 512 MiB.
    Raises ModelError as loading does, and ConfigError for what does not fit the model or the machine.
    """
    plan = plan or BenchPlan()
    tell = progress or (lambda done, total, what: None)
    path = resolve(model)
    about = inspect_model(path)
    config = EngineConfig.build(None, settings)
    context = min(config.max_context or about.max_context, about.max_context)
    works = plan.works(context)
    config = _with_room(config, about, works)
    parts = load_parts(path, config, lambda done, total: tell(done, total, "loading"))
    with Engine(parts) as engine:
        probe = LimitProbe(parts.executor.threads)
        bench = _Bench(engine, parts, clock, plan.profile)
        samples = _measure(bench, probe, works, plan.repeat, tell)
        weights = parts.executor.weights
        kv_dtype = kv_dtype_of(config, compute_mode(config, quantised=weights.quantised))
        costs = CostModel(parts.spec, weights, fast=parts.executor.fast, kv_dtype=kv_dtype)
        return BenchReport(
            miro=miro_cy.__version__,
            machine=this_machine(active_isa(), parts.executor.threads),
            model=Model(
                name=about.name,
                format=about.format,
                parameters=about.parameters,
                file_bytes=about.bytes,
                packed_bytes=weights.nbytes,
                compute="fast" if parts.executor.fast else "exact",
                kv_dtype=kv_dtype,
            ),
            settings=Settings(
                plan.repeat, plan.tokens, context, config.block_size, config.max_step_tokens, config.step_ms
            ),
            limits=probe.best,
            rows=[_row(work, samples[work], costs, probe) for work in works],
        )


def _with_room(config: EngineConfig, about: ModelReport, works: list[Work]) -> EngineConfig:
    """The settings with a KV pool that holds every work. Raises ConfigError when the machine does not."""
    if about.problem is None:  # else loading refuses it, with the right kind of error
        dtype = kv_dtype_of(config, config.compute or about.compute)
        # One block more a sequence: admission keeps one for each that grows.
        blocks = max(work.rows * (2 + work.room // config.block_size) for work in works)
        needed = blocks * config.block_size * about.kv_bytes_per_token[dtype]
        if needed > (free := available_memory()):
            raise Unavailable(f"these rows need a KV cache of {needed} bytes, only {free} are free", field="rows")
        config = EngineConfig.build(config, {"kv_memory": needed})
    return EngineConfig.build(config, {"max_num_seqs": max(work.rows for work in works), "step_ms": STEP_MS})


def _measure(
    bench: _Bench, probe: LimitProbe, works: list[Work], repeat: int, tell: Progress
) -> dict[Work, list[Sample]]:
    samples: dict[Work, list[Sample]] = {work: [] for work in works}
    total = (repeat + 1) * len(works)
    tell(0, total, "warming up")
    bench.warm_up()
    for repetition in range(repeat + 1):
        for index, work in enumerate(works):
            tell(repetition * len(works) + index, total, str(work))
            probe.measure()
            sample = bench.run(work)
            if repetition:  # the first one warms up
                samples[work].append(sample)
    tell(total, total, "done")
    return samples


def _row(work: Work, samples: list[Sample], costs: CostModel, probe: LimitProbe) -> Row:
    # All repetitions do the same steps; should the scheduler once cut one otherwise, the median's cost is what counts.
    middle = sorted(samples, key=lambda sample: sample.seconds)[len(samples) // 2]
    cost = sum(map(costs.step, middle.steps), Cost())
    seconds = [sample.seconds for sample in samples]
    row = Row.of(
        work.kind, work.rows, work.depth, work.rows * work.tokens, len(middle.steps), seconds, cost, probe.best
    )
    if middle.parts is not None:
        row.profile = {**middle.parts, "rest": max(0.0, middle.seconds - sum(middle.parts.values()))}
    return row


class _Bench:
    """Runs works on an engine whose steps nobody else drives."""

    def __init__(self, engine: Engine, parts: Parts, clock: Clock, profile: bool) -> None:
        self._engine = engine
        self._executor = parts.executor if profile else None
        self._view = parts.scheduler.view  # after a step: its rows
        self._clock = clock
        self._rng = np.random.default_rng(0)

    def warm_up(self) -> None:
        length = min(FIRST_PROMPT, self._engine.context - 1)
        self._add(length, 1)
        self._finish()

    def run(self, work: Work) -> Sample:
        sample = Sample()
        if work.kind == "prompt":
            self._add(work.tokens, 1)
            with self._profiled(sample):
                while not any(event.tokens for event in self._step(sample)):
                    pass
            self._finish()
            return sample
        requests = [self._add(work.depth, work.max_new) for _ in range(work.rows)]
        started: set[int] = set()
        while len(started) < work.rows:
            started |= {event.request_id for event in self._step()}
        with self._profiled(sample):
            for _ in range(work.tokens):
                if len(self._step(sample)) != work.rows:
                    raise InternalError(f"the engine did not decode {work.rows} rows at once")
        for request in requests:
            self._engine.abort(request)
        self._finish()
        return sample

    @contextmanager
    def _profiled(self, sample: Sample) -> Iterator[None]:
        if self._executor is not None:
            self._executor.start_profile()
        yield
        if self._executor is not None:
            sample.parts = self._executor.stop_profile()

    def _add(self, length: int, max_tokens: int) -> int:
        ids = self._rng.integers(0, self._engine.vocab_size, length).astype(np.int32)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self._engine.add(Request({"tokens": ids}, params))

    def _step(self, sample: Sample | None = None) -> list[Event]:
        """One step, added to the sample. Raises what ended a request."""
        began = self._clock()
        events = self._engine.step()
        seconds = self._clock() - began
        for event in events:
            if event.error is not None:
                raise event.error
        if sample is not None:
            sample.seconds += seconds
            sample.steps.append(list(self._rows()))
        return events

    def _rows(self) -> Iterator[StepRow]:
        for _, first, n_tok, n_log in self._view.rows():
            yield first, n_tok, n_log

    def _finish(self) -> None:
        while self._engine.has_work:
            self._step()
