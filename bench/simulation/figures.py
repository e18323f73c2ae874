"""What comes out of a run: speeds, waits, memory, and what the scheduler itself took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulation.workload import Floats, Ints
from simulation.world import Outcome


@dataclass(frozen=True, slots=True)
class Waits:
    """Milliseconds; None when there were none. Percentiles are values that occurred: the least with so many not above
    it.
    """

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Floats) -> Waits:
        if not len(seconds):
            return cls(None, None, None, None)
        cuts = np.percentile(seconds, (50, 95, 99, 100), method="inverted_cdf")
        return cls(*(float(cut) for cut in 1000 * cuts))


@dataclass(frozen=True, slots=True)
class Waste:
    """Token slots that a sequence holds at its end and does not use: mean, and standard error of the mean. expected:
    half a block less half a token, what it is when every length is as likely as the next. whole_context, max_tokens:
    means of a cache that reserves one piece a sequence, as long as any may become or as this one may.
    """

    sequences: int
    mean: float
    error: float
    expected: float
    whole_context: float
    max_tokens: float

    @property
    def as_expected(self) -> bool:
        """Within three standard errors."""
        return abs(self.mean - self.expected) <= 3 * self.error

    @classmethod
    def of(cls, out: Outcome, block_size: int) -> Waste:
        work, served = out.workload, ~out.refused
        # The last token's keys and values are never stored.
        stored = (work.n_prompt + work.answer - 1)[served]
        wasted = out.slots[served] - stored
        return cls(
            sequences=len(wasted),
            mean=float(wasted.mean()),
            error=_error(wasted),
            expected=(block_size - 1) / 2,
            whole_context=float((work.shape.longest - stored).mean()),
            max_tokens=float(((work.n_prompt + work.allowed)[served] - stored).mean()),
        )


def _error(values: Ints) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Overhead:
    """CPU time of the scheduler's own: microseconds a step (mean and p99), a live sequence, and an added request; share
    of the steps' simulated time.
    """

    live: float
    step_us: float
    step_p99_us: float
    live_us: float
    add_us: float
    share: float

    @classmethod
    def of(cls, out: Outcome, *, live: int = 0) -> Overhead:
        """Of the steps with at least so many live sequences."""
        lives, cpu, step = (np.array(values, float) for values in (out.live, out.cpu_s, out.step_s))
        chosen = lives >= live
        lives, cpu, step = lives[chosen], 1e6 * cpu[chosen], 1e6 * step[chosen]
        return cls(
            live=float(lives.mean()),
            step_us=float(cpu.mean()),
            step_p99_us=float(np.percentile(cpu, 99, method="inverted_cdf")),
            live_us=float(cpu.sum() / lives.sum()),
            add_us=1e6 * out.add_cpu_s / len(out.workload),
            share=float(cpu.sum() / step.sum()),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """One run.

    requests_per_s: of those that were served, while the run lasted; tokens_per_s: generated ones. ttft: from arrival to
    the first token; of all, of the requests of light clients (those who together send the rarer half), and of urgent
    ones (of the higher priority). gap: between two tokens of a stream. kv_mean, kv_peak: share of the pool in use.
    recomputed: of all tokens computed, those computed again after a preemption. cached: of all prompt tokens, those not
    computed.
    """

    served: int
    refused: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Waits
    ttft_light_ms: Waits
    ttft_urgent_ms: Waits
    gap_ms: Waits
    kv_mean: float
    kv_peak: float
    preemptions: int
    recomputed_tokens: int
    recomputed: float
    cached: float
    waste: Waste
    overhead: Overhead

    @classmethod
    def of(cls, out: Outcome, block_size: int) -> Figures:
        work, served = out.workload, ~out.refused
        needed = int((work.n_prompt + work.answer - 1 - out.cached)[served].sum())
        ttft = out.first - work.arrival
        span = out.seconds - float(work.arrival[0])
        return cls(
            served=int(served.sum()),
            refused=int(out.refused.sum()),
            seconds=span,
            requests_per_s=float(served.sum() / span),
            tokens_per_s=float(work.answer[served].sum() / span),
            ttft_ms=Waits.of(ttft[served]),
            ttft_light_ms=Waits.of(ttft[served & light(work.client)]),
            ttft_urgent_ms=Waits.of(ttft[served & (work.priority > 0)]),
            gap_ms=Waits.of(out.gaps),
            kv_mean=out.kv_mean,
            kv_peak=out.kv_peak,
            preemptions=out.preemptions,
            recomputed_tokens=out.computed - needed,
            recomputed=(out.computed - needed) / out.computed,
            cached=float(out.cached[served].sum() / work.n_prompt[served].sum()),
            waste=Waste.of(out, block_size),
            overhead=Overhead.of(out),
        )


def light(client: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which requests come from the clients that send least and together at most half of all."""
    sent = np.bincount(client)
    order = np.argsort(sent, kind="stable")
    few = order[np.cumsum(sent[order]) <= len(client) / 2]
    return np.isin(client, few)
