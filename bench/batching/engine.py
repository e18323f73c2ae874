"""A loaded model whose executor serves several schedulers in turn, one at a time: weights are loaded once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.config import EngineConfig
from miro_cy.core import EngineCore
from miro_cy.errors import ConfigError, InternalError
from miro_cy.inspect import inspect_model
from miro_cy.loading import Parts, kv_dtype_of, load_parts
from miro_cy.requests import Event, Request
from miro_cy.sampling.params import SamplingParams
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig

Clock = Callable[[], float]

#: Steps that long cut no prompt.
WHOLE_MS = 60_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """requests at once, each with a prompt and new tokens; long: tokens of the prompt that arrives while they run;
    stagger: steps between two arrivals; sequential: of the requests, how many are run one after the other; reserve:
    tokens that a contiguous cache keeps for each sequence.
    """

    requests: int = 8
    prompt: int = 32
    new: int = 128
    long: int = 1500
    stagger: int = 1
    sequential: int = 2
    reserve: int = 512

    @property
    def stream(self) -> int:
        """Tokens of a stream that runs while the long prompt arrives. No chunk is under 16 tokens, so that it lasts."""
        return 16 + (self.requests * self.prompt + self.long) // 8

    @property
    def tokens(self) -> int:
        """Of all sequences at the fullest moment."""
        return self.requests * (self.prompt + max(self.new, self.stream)) + self.long

    @property
    def context(self) -> int:
        return max(self.prompt + max(self.new, self.stream), self.long + 1)


class Meter:
    """The executor, noting the most blocks that were in use, and the tokens of the last step. dry: computes nothing."""

    def __init__(self, parts: Parts, pool: BlockPool) -> None:
        self._executor = parts.executor
        self._pool = pool
        self._nothing = np.zeros((1, parts.spec.vocab_size), np.float32)
        self.dry = False
        self.most_blocks = 0
        self.tokens = 0

    def forward(self, view: BatchView) -> NDArray[np.float32]:
        self.tokens = view.n_tokens
        self.most_blocks = max(self.most_blocks, self._pool.n_blocks - self._pool.n_free - self._pool.n_cached)
        if self.dry:
            return np.repeat(self._nothing, view.n_logits, axis=0)
        return self._executor.forward(view)


class Stepper:
    """A scheduler and a KV pool of its own over a model's executor. Only one of them may have requests at a time."""

    def __init__(self, parts: Parts, task: Task, *, whole: bool, clock: Clock = time.monotonic) -> None:
        """whole: a prompt goes through in one step, however long that takes; else as a server with defaults does it."""
        size = parts.config.block_size
        n_blocks = parts.capacity // size
        pool = BlockPool(n_blocks, size, PrefixIndex(n_blocks, size))
        tables = BlockTables(1, parts.config.max_num_seqs, -(-parts.context // size))
        limits: dict[str, int | float] = {"max_num_seqs": parts.config.max_num_seqs}
        if whole:
            limits |= {"step_ms": WHOLE_MS, "max_step_tokens": parts.config.max_step_tokens}
        config = SchedulerConfig(**limits)  # type: ignore[arg-type]  # each number is of its field's type
        self.meter = Meter(parts, pool)
        self.scheduler = Scheduler(pool, tables, config, max_context=parts.context, clock=clock)
        self.core = EngineCore(self.meter, self.scheduler, pool, parts.tokenizer, clock)
        self.clock = clock
        self._rng = np.random.default_rng(0)
        self._vocab = parts.spec.vocab_size
        if whole:
            self._learn(task.long)

    def add(self, length: int, new: int) -> int:
        """Queue a prompt of random ids."""
        ids = self._rng.integers(0, self._vocab, length).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, seed=0)
        return self.core.add(Request({"tokens": ids}, params), new)

    def step(self) -> list[Event]:
        """One step. Raises what ended a request."""
        events = self.core.step()
        for event in events:
            if event.error is not None:
                raise event.error
        return events

    def finish(self, requests: list[int]) -> None:
        """Cancel these, and step until nothing is left."""
        for request in requests:
            self.core.abort(request)
        while self.core.has_work:
            self.step()

    def _learn(self, length: int) -> None:
        """Until a prompt of that length goes through in one step: no step takes much more than one before it."""
        self.meter.dry = True
        for _ in range(64):
            self.add(length, 1)
            self.step()
            done = self.meter.tokens == length
            self.finish([])
            if done:
                break
        else:
            raise InternalError(f"a prompt of {length} tokens does not go through in one step")
        self.meter.dry = False


@contextmanager
def open_model(path: Path, task: Task, threads: int) -> Iterator[Parts]:
    """The model, with room for the task. Raises as loading does, and ConfigError when its context is too short."""
    about = inspect_model(path)
    if about.problem is None and task.context > about.max_context:
        raise ConfigError(f"{task.context} tokens are needed, the model was made for {about.max_context}", field="long")
    config = EngineConfig(threads=threads, max_context=task.context, max_num_seqs=task.requests + 1)
    dtype = kv_dtype_of(config, about.compute)
    # Beside its tokens, a block for each sequence's last, partly filled one, and one that admission keeps for it.
    tokens = task.tokens + 2 * (task.requests + 1) * config.block_size
    changes = {
        "kv_memory": tokens * about.kv_bytes_per_token[dtype],
        "max_step_tokens": max(config.max_step_tokens, task.long + task.requests),
    }
    parts = load_parts(path, EngineConfig.build(config, changes))
    try:
        yield parts
    finally:
        parts.executor.close()
