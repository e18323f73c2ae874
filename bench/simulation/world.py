"""The engine's loop over the real scheduler, pool, tables and prefix index, where a step takes what a formula says."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from miro_cy.batch import BatchView
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.errors import QueueFull
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig
from simulation.workload import Floats, Ints, Workload

#: The token that every row generates.
TOKEN = 7
#: Steps take this much more or less (the standard deviation of a logarithm) than the formula says.
NOISE = 0.05
NOISE_DRAWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step takes: a pass over the weights, something for each decode row and each prompt token, and for each key
    that one of them attends to. The defaults are about what a model of 135M parameters with weights of 4 bits takes on
    two cores with AVX2.
    """

    pass_ms: float = 8.0
    row_ms: float = 0.8
    token_ms: float = 0.8
    row_key_us: float = 1.2
    token_key_us: float = 0.7

    def seconds(self, first: Ints, n_tok: Ints, is_decode: NDArray[np.bool_]) -> float:
        """Of a step with rows of n_tok tokens from position `first`."""
        keys = n_tok * first + n_tok * (n_tok + 1) // 2
        n_rows = int(is_decode.sum())
        row_keys, chunk_keys = int(keys[is_decode].sum()), int(keys[~is_decode].sum())
        ms = self.pass_ms + self.row_ms * n_rows + self.token_ms * (int(n_tok.sum()) - n_rows)
        return (ms + (self.row_key_us * row_keys + self.token_key_us * chunk_keys) / 1000) / 1000


@dataclass(slots=True)
class Outcome:
    """What happened to each request of a workload, and to the whole.

    first, last: seconds of the first and the last token, NaN for a request that was refused. slots: token slots of its
    blocks at its end. cached: prompt tokens it did not compute. gaps: seconds between two tokens of a stream, of all
    streams. emptied, done: when the queue was empty for the first time after the start, and how many had ended by then.
    kv_mean: share of the pool in use, over time. A step each: live (sequences that run), step_s, and cpu_s, what plan,
    commit and finish took of this thread's CPU time. add_cpu_s: what all calls of `add` took.
    """

    workload: Workload
    first: Floats
    last: Floats
    slots: Ints
    cached: Ints
    gaps: Floats
    seconds: float = 0.0
    computed: int = 0
    preemptions: int = 0
    kv_mean: float = 0.0
    kv_peak: float = 0.0
    emptied: float = 0.0
    done: int = 0
    add_cpu_s: float = 0.0
    live: array[int] = field(default_factory=lambda: array("i"))
    step_s: array[float] = field(default_factory=lambda: array("d"))
    cpu_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def refused(self) -> NDArray[np.bool_]:
        return np.isnan(self.first)


class World:
    """One run. config: the scheduler's; kv_tokens: what the pool holds; tell(done, requests): now and then."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        cost: StepCost,
        *,
        kv_tokens: int,
        block_size: int = 32,
        tell: Callable[[int, int], None] = lambda done, requests: None,
    ) -> None:
        n, n_blocks = len(workload), kv_tokens // block_size
        context = workload.shape.longest
        self.pool = BlockPool(n_blocks, block_size, PrefixIndex(n_blocks, block_size))
        self._tables = BlockTables(1, config.max_num_seqs, -(-context // block_size))
        self._now = 0.0
        self.scheduler = Scheduler(self.pool, self._tables, config, max_context=context, clock=lambda: self._now)
        self._work = workload
        self._cost = cost
        self._tell = tell
        self._request = np.zeros(n, np.int64)  # by sequence id
        self._n_added = self._n_ended = self._next = self._n_gaps = 0
        self._generated = np.zeros(n, np.int64)
        nan = np.full(n, np.nan)
        gaps = np.zeros(int(workload.answer.sum()))
        self._out = Outcome(workload, nan, nan.copy(), np.zeros(n, np.int64), np.zeros(n, np.int64), gaps)
        self._noise = np.exp(NOISE * np.random.default_rng([workload.shape.seed, 1]).standard_normal(NOISE_DRAWS))

    def run(self) -> Outcome:
        """Serve the whole workload."""
        out, n = self._out, len(self._work)
        while True:
            self._arrive()
            live, cpu = self.scheduler.n_running, time.thread_time()
            view = self.scheduler.plan()
            ids = self.scheduler.planned()
            cpu = time.thread_time() - cpu
            if view is None:
                if self._next == n:
                    break
                self._now = float(self._work.arrival[self._next])
                continue
            out.live.append(max(live, self.scheduler.n_running))
            out.step_s.append(self._step(view, np.array(ids)))
            out.cpu_s[-1] += cpu
            if not out.emptied and not self.scheduler.n_waiting:
                out.emptied, out.done = self._now, self._n_ended
            if len(out.live) % 512 == 0:
                self._tell(self._n_ended, n)
        out.gaps = out.gaps[: self._n_gaps]
        out.seconds = self._now
        out.kv_mean /= sum(out.step_s)
        out.preemptions = self.scheduler.preemptions
        return out

    def _arrive(self) -> None:
        """Add whoever has come by now."""
        work = self._work
        while self._next < len(work) and work.arrival[self._next] <= self._now:
            i = self._next
            tokens, client = work.prompt(i), f"client {work.client[i]}"
            cpu = time.thread_time()
            try:
                seq = self.scheduler.add(tokens, int(work.allowed[i]), priority=int(work.priority[i]), client=client)
                self._request[seq] = i
                self._n_added += 1
            except QueueFull:
                self._n_ended += 1
            self._out.add_cpu_s += time.thread_time() - cpu
            self._next += 1

    def _step(self, view: BatchView, ids: Ints) -> float:
        """Let the planned step pass; returns its seconds."""
        out, work = self._out, self._work
        slot, first, n_tok, n_log = np.array(view.rows(), np.int64).T
        request, gives = self._request[ids], n_log > 0
        used = 1 - (self.pool.n_free + self.pool.n_cached) / self.pool.n_blocks
        seconds = self._cost.seconds(first, n_tok, gives & (first >= work.n_prompt[request]) & (n_tok == 1))
        seconds *= self._noise[len(out.step_s) % NOISE_DRAWS]
        self._now += seconds
        out.computed += int(n_tok.sum())
        out.kv_mean += used * seconds
        out.kv_peak = max(out.kv_peak, used)
        self._generated[request[gives]] += 1
        ends = gives & (self._generated[request] == work.answer[request])
        sampled = np.where(gives & ~ends, TOKEN, -1).astype(np.int32)
        self._take_times(request[gives])
        ended = ids[ends].tolist()
        for i, seq, at in zip(request[ends].tolist(), ended, slot[ends].tolist(), strict=True):
            out.slots[i] = self._tables.length(at) * self.pool.block_size
            out.cached[i] = self.scheduler.cached_tokens(seq)
        cpu = time.thread_time()
        self.scheduler.commit(sampled, seconds)
        for seq in ended:
            self.scheduler.finish(seq)
        out.cpu_s.append(time.thread_time() - cpu)
        self._n_ended += len(ended)
        return seconds

    def _take_times(self, request: Ints) -> None:
        """Each of these got a token."""
        out, begins = self._out, self._generated[request] == 1
        out.first[request[begins]] = self._now
        streams = request[~begins]
        out.gaps[self._n_gaps : self._n_gaps + len(streams)] = self._now - out.last[streams]
        self._n_gaps += len(streams)
        out.last[request] = self._now
