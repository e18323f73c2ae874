"""`miro bench --connect`: a worker's speed as a client sees it, without the engine's package.

A prompt's time is what the worker says its prefill took. A decode's begins when the last of its streams has given its
first chunk, and ends when each has given `tokens` more tokens: all of them run all that time.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from miro_client import __version__
from miro_client.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from miro_client import Client
    from miro_client.client import Generation
    from miro_client.wire import ModelInfo

Progress = Callable[[int, int, str], None]
Clock = Callable[[], float]

DEFAULT_PROMPT = 512
#: Prompt tokens that each step computes at least; a stream may be that many steps ahead of the last one to begin...
LEAST_CHUNK = 16
#: ...and this many tokens more, for the time that requests take to arrive.
SLACK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What to measure; fields and methods as those of miro_cy.tools.bench.BenchPlan."""

    prompts: tuple[int, ...] = ()
    rows: tuple[int, ...] = (1, 8, 32)
    depths: tuple[int, ...] = (32,)
    tokens: int = 32
    repeat: int = 3
    exactly: tuple[Work, ...] = ()

    def works(self, context: int, requests: int) -> list[Work]:
        """The works, prompts first. Raises ConfigError for one that the worker's context does not hold, and for more
        rows than it takes requests of one connection (0: not known).
        """
        works = list(self.exactly)
        if not works:
            prompts = self.prompts or (min(DEFAULT_PROMPT, context - 1),)
            works = [Work("prompt", 1, 0, length) for length in prompts]
            works += [Work("decode", rows, depth, self.tokens) for depth in self.depths for rows in self.rows]
        for work in works:
            if work.room > context:
                raise ConfigError(
                    f"{work} needs a context of {work.room} tokens, the worker's is {context}",
                    field="prompt" if work.kind == "prompt" else "depth",
                )
            if 0 < requests < work.rows:
                raise ConfigError(
                    f"{work} needs {work.rows} requests at once, the worker takes {requests} of one client",
                    field="rows",
                )
        return list(dict.fromkeys(works))


class Work(NamedTuple):
    """tokens: of the prompt, or of each row. depth: prompt of each row, 0 for a prompt."""

    kind: str
    rows: int
    depth: int
    tokens: int

    def __str__(self) -> str:
        if self.kind == "prompt":
            return f"a prompt of {self.tokens} tokens"
        return f"decoding {self.tokens} tokens, {self.rows} at once at depth {self.depth},"

    @property
    def room(self) -> int:
        """Tokens of a sequence: a decode's begins with one that is not counted."""
        return self.depth + self.tokens + 1


@dataclass(frozen=True, slots=True)
class Worker:
    """server: its program and version."""

    endpoint: str
    server: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Machine:
    """As far as a worker tells."""

    isa: str
    threads: int


@dataclass(frozen=True, slots=True)
class Model:
    """layers: 0 where the worker does not tell."""

    name: str
    layers: int
    packed_bytes: int
    compute: str
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class Settings:
    repeat: int
    tokens: int
    context: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the repetitions."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """As Row of miro_cy.tools.report, without what only the engine knows."""

    work: str
    rows: int
    depth: int
    tokens: int
    seconds: Spread
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What `miro bench --connect --json` prints: the engine's report (miro_cy/tools/report.py), as far as known."""

    format: str = "miro-bench"
    format_version: int = 1
    miro: str = __version__
    worker: Worker
    machine: Machine
    model: Model
    settings: Settings
    rows: list[WorkerRow]


def run_bench(
    client: Client, plan: WorkerPlan, *, progress: Progress | None = None, clock: Clock = time.perf_counter
) -> WorkerReport:
    """Measure the worker of a client. Raises what its requests raise, and ConfigError for what it has no room for."""
    tell = progress or (lambda done, total, what: None)
    welcome, about = client.hello(), client.models()[0]
    works = plan.works(about.context, welcome.limits.requests)
    bench = _Bench(client, about, clock)
    samples: dict[Work, list[float]] = {work: [] for work in works}
    total = (plan.repeat + 1) * len(works)
    for repetition in range(plan.repeat + 1):
        for index, work in enumerate(works):
            kind, rows, depth, tokens = work
            tell(repetition * len(works) + index, total, f"{kind}, {rows} at once")
            seconds = bench.prompt(tokens) if kind == "prompt" else bench.decode(rows, depth, tokens)
            if repetition:  # the first one warms up
                samples[work].append(seconds)
    return WorkerReport(
        worker=Worker(client.endpoint, welcome.server, about.fingerprint),
        machine=Machine(about.isa, about.threads),
        model=Model(about.name, about.layers, about.weight_bytes, about.compute, about.kv_dtype),
        settings=Settings(plan.repeat, plan.tokens, about.context, about.block_size),
        rows=[_row(*work, samples[work]) for work in works],
    )


def _row(kind: str, rows: int, depth: int, each: int, seconds: Sequence[float]) -> WorkerRow:
    spread = Spread(statistics.median(seconds), min(seconds), max(seconds))
    return WorkerRow(kind, rows, depth, rows * each, spread, rows * each / spread.median)


class _Bench:
    def __init__(self, client: Client, about: ModelInfo, clock: Clock) -> None:
        self._client = client
        self._context = about.context
        self._vocab_size = about.vocab_size
        self._clock = clock
        self._random = random.Random(0)
        self._salt = os.urandom(8).hex()  # the same prompts again in the next run: the worker must not know them

    def prompt(self, length: int) -> float:
        """Seconds of one prompt's prefill."""
        result = self._client.complete(tokens=self._draw(length), max_tokens=1, temperature=0.0, cache_salt=self._salt)
        if result.usage.cached_tokens:
            raise InternalError("the worker did not compute the whole prompt")
        return max(result.timing.prefill_ms, 1e-6) / 1000.0

    def decode(self, rows: int, depth: int, tokens: int) -> float:
        """Seconds in which each of the rows gets `tokens` tokens. Raises ConfigError when they do not run at once."""
        most = min(self._context - depth, tokens + rows * depth // LEAST_CHUNK + SLACK)
        window = _Window(rows, tokens, self._clock)
        with ThreadPoolExecutor(rows) as threads, ExitStack() as open_streams:
            try:
                streams = [open_streams.enter_context(self._stream(depth, most)) for _ in range(rows)]
                listeners = [threads.submit(window.listen, stream) for stream in streams]
                ends = [listener.result() for listener in as_completed(listeners)]  # the first that fails ends it
            except BaseException:
                self._client.close()  # wakes the threads that wait for a chunk
                raise
        if None in ends:
            raise ConfigError(
                f"a stream of {most} tokens ended before {rows} ran at once: the worker takes fewer, or is too fast",
                field="rows",
            )
        return window.seconds(max(filter(None, ends)))

    def _stream(self, depth: int, most: int) -> Generation:
        ids = self._draw(depth)
        return self._client.generate(
            tokens=ids, max_tokens=most, temperature=0.0, ignore_eos=True, cache_salt=self._salt
        )

    def _draw(self, length: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=length)


class _Window:
    """The time in which all streams run: from the first chunk of the last one on. Each has a thread that listens."""

    def __init__(self, rows: int, tokens: int, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._to_come = rows
        self._tokens = tokens
        self._clock = clock
        self._began: float | None = None

    def listen(self, stream: Generation) -> float | None:
        """When the stream had given `tokens` tokens in the window; None when it ended before."""
        if next(stream, None) is None:
            return None
        with self._lock:
            self._to_come -= 1
            if self._to_come == 0:
                self._began = self._clock()
        count = 0
        while (chunk := next(stream, None)) is not None:
            if self._began is not None:
                count += len(chunk.tokens)
            if count >= self._tokens:
                now = self._clock()
                stream.close()  # the others are done with the same step
                return now
        return None

    def seconds(self, end: float) -> float:
        """From the window's beginning to its end."""
        return max(end - (self._began or 0.0), 1e-9)
