"""Works done by an engine's own steps, and timed.

A prompt's time is that of its steps; a decode's that of `tokens` steps which carry nothing but its rows. Prompts are
random token ids, never the same twice. Settings differ from a server's in one thing: step_ms is so long that a prompt
goes through in the largest chunks the engine takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miro_cy.config import EngineConfig
from miro_cy.engine import Engine
from miro_cy.errors import InternalError, Unavailable
from miro_cy.inspect import ModelReport
from miro_cy.loading import Parts, Progress, kv_dtype_of, load_parts
from miro_cy.machine import available_memory, default_threads
from miro_cy.memory import room_for
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.weights import packable_parts
from miro_cy.requests import Event, Request
from miro_cy.sampling.params import SamplingParams
from miro_cy.tools.cost import StepRow
from miro_cy.tools.plan import Work

#: Seconds, from any start.
Clock = Callable[[], float]

#: The longest that EngineConfig takes: no prompt chunk is cut to keep a stream going.
STEP_MS = 60_000.0
#: Prompt tokens after which the engine knows what a prompt token costs; before, it takes small chunks.
FIRST_PROMPT = 64


def with_room(config: EngineConfig, about: ModelReport, works: Sequence[Work]) -> EngineConfig:
    """The settings with a KV pool that holds every work. Raises ConfigError when the machine does not, beside the
    weights and a step's buffers.
    """
    config = EngineConfig.build(config, {"max_num_seqs": max(work.rows for work in works), "step_ms": STEP_MS})
    if about.problem is not None:  # loading refuses it, with the right kind of error
        return config
    dtype = kv_dtype_of(config, config.compute or about.compute)
    # One block more a sequence: admission keeps one for each that grows.
    blocks = max(work.rows * (2 + work.room // config.block_size) for work in works)
    with open_checkpoint(Path(about.path)) as checkpoint:
        room = room_for(
            checkpoint.spec, packable_parts(checkpoint), config, dtype,
            threads=config.threads or default_threads(), context=config.max_context or about.max_context,
            total=available_memory(),
        )  # fmt: skip
    needed = blocks * room.block
    if needed > room.left:
        raise Unavailable(f"these rows need a KV cache of {needed:,} bytes, but {room}", field="rows")
    return EngineConfig.build(config, {"kv_memory": needed})


@contextmanager
def open_bench(
    path: Path,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    profile: bool = False,
) -> Iterator[StepBench]:
    """A bench over a model that is loaded for it, with settings that `with_room` made. Raises as loading does."""
    parts = load_parts(path, config, progress)
    with Engine(parts) as engine:
        yield StepBench(engine, parts, clock, profile)


@dataclass(slots=True)
class Sample:
    """One repetition: the seconds of its steps, where they went, and what the steps computed."""

    seconds: float = 0.0
    steps: list[list[StepRow]] = field(default_factory=list)
    parts: dict[str, float] | None = None


class StepBench:
    """Runs works on an engine whose steps nobody else drives. parts: what the engine was made of."""

    def __init__(self, engine: Engine, parts: Parts, clock: Clock, profile: bool) -> None:
        self.parts = parts
        self._engine = engine
        self._executor = parts.executor if profile else None
        self._view = parts.scheduler.view  # after a step: its rows
        self._clock = clock
        self._rng = np.random.default_rng(0)

    def warm_up(self) -> None:
        """A first prompt, after which the engine knows its own speed."""
        length = min(FIRST_PROMPT, self._engine.context - 1)
        self._add(length, 1)
        self._finish()

    def run(self, work: Work) -> Sample:
        """One repetition of a work. Raises what ended a request."""
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
