"""Ways to serve the same requests, each measured on steppers that the ways share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batching.engine import Stepper, Task
from miro_cy.batch import BatchView  # noqa: F401  (loads the extension before the scheduler cimports it)
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.config import MAX_NUM_SEQS
from miro_cy.errors import InternalError
from miro_cy.sched.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Way:
    """batch: how many of the requests share steps; staggered: they arrive one after the other and join what runs;
    whole: prompts go through in one step; paged: the KV cache is in blocks, taken as they are needed.
    """

    name: str
    title: str
    batch: bool
    staggered: bool = False
    whole: bool = True
    paged: bool = True


WAYS = (
    Way("naive", "one at a time, contiguous", batch=False, paged=False),
    Way("static", "paged, one static batch", batch=True),
    Way("continuous", "continuous batching", batch=True, staggered=True),
    Way("chunked", "+ chunked prefill", batch=True, staggered=True, whole=False),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One way in one round. gap_ms: p99 of the gaps of running streams that overlap the prefill of a long prompt, and
    ttft_ms, how long that one waited for its first token; None where nobody may join a running batch.
    """

    tokens_per_s: float
    kv_bytes: int
    gap_ms: float | None = None
    ttft_ms: float | None = None


def sample(way: Way, stepper: Stepper, task: Task, token_bytes: int, block_size: int) -> Sample:
    """One round of a way. token_bytes: of the KV cache."""
    stepper.meter.most_blocks = 0
    if way.batch:
        starts = [i * task.stagger if way.staggered else 0 for i in range(task.requests)]
        seconds, tokens = serve(stepper, starts, task)
    else:
        runs = [serve(stepper, [0], task) for _ in range(min(task.sequential, task.requests))]
        seconds, tokens = sum(run[0] for run in runs), sum(run[1] for run in runs)
    kv_tokens = stepper.meter.most_blocks * block_size if way.paged else task.requests * task.reserve
    speed, kv_bytes = tokens / seconds, kv_tokens * token_bytes
    if not way.staggered:
        return Sample(speed, kv_bytes)
    gaps, ttft = interrupt(stepper, task)
    return Sample(speed, kv_bytes, 1000 * p99(gaps), 1000 * ttft)


def serve(stepper: Stepper, starts: Sequence[int], task: Task) -> tuple[float, int]:
    """Run requests that arrive before the steps of these numbers; (seconds until all have ended, tokens generated)."""
    left, at, n, tokens = list(starts), 0, 0, 0
    began = stepper.clock()
    while left or n:
        while left and left[0] <= at:
            stepper.add(task.prompt, task.new)
            del left[0]
            n += 1
        for event in stepper.step():
            tokens += len(event.tokens)
            n -= event.finish_reason is not None
        at += 1
    return stepper.clock() - began, tokens


def interrupt(stepper: Stepper, task: Task) -> tuple[list[float], float]:
    """A long prompt arrives while streams run: the seconds of all their gaps until it has its first token, and its
    seconds to that token.
    """
    streams = [stepper.add(task.prompt, task.stream) for _ in range(task.requests)]
    last: dict[int, float] = {}
    for _ in range(4):  # steps in which all of them get a token: no prompt is left
        while {event.request_id for event in stepper.step()} != set(streams):
            pass
        last = dict.fromkeys(streams, stepper.clock())
    arrived = stepper.clock()
    intruder = stepper.add(task.long, 1)
    gaps: list[float] = []
    ttft = 0.0
    while not ttft:
        events = stepper.step()
        now = stepper.clock()
        for event in events:
            if event.request_id == intruder:
                ttft = now - arrived
            elif event.finish_reason is not None:
                raise InternalError("a stream ended before the long prompt had its first token")
            else:
                gaps.append(now - last[event.request_id])
                last[event.request_id] = now
    stepper.finish(streams)
    return gaps, ttft


def p99(seconds: Sequence[float]) -> float:
    """The least of them that 99 % are not above."""
    return float(np.percentile(seconds, 99, method="inverted_cdf"))


def fitting(task: Task, block_size: int) -> int:
    """How many sequences a paged pool holds at once, to their last token, in the memory that a contiguous cache takes
    for `requests` of them. Asked of the scheduler itself, with all their blocks taken at admission.
    """
    n_blocks = task.requests * task.reserve // block_size
    pool = BlockPool(n_blocks, block_size)
    tables = BlockTables(1, n_blocks, -(-(task.prompt + task.new) // block_size))
    most = min(n_blocks, MAX_NUM_SEQS)
    config = SchedulerConfig(max_num_seqs=most, max_waiting=n_blocks, admission="reserve")
    scheduler = Scheduler(pool, tables, config, max_context=task.prompt + task.new, clock=lambda: 0.0)
    for _ in range(n_blocks):
        scheduler.add(np.zeros(task.prompt, np.int32), task.new)
    while (view := scheduler.plan()) is not None:
        scheduler.commit(np.full(view.n_rows, -1, np.int32), 0.0)  # prompts alone: nobody generates, nobody ends
    return scheduler.n_running
