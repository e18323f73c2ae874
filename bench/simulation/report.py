"""What a simulation prints: tables for a person, one object as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from simulation.figures import Overhead, Waits, Waste
from simulation.variants import Machine, Row
from simulation.workload import Shape

FORMAT = "miro-simulate"
VERSION = 1


def result_of(shape: Shape, machine: Machine, rate: float, own: Overhead, rows: Sequence[Row]) -> dict[str, Any]:
    """All of it, as JSON takes it. Only fields called `overhead` hold times of this computer; the rest follows from the
    seed.
    """
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "shape": {key: value for key, value in asdict(shape).items() if key != "arrivals"},
        "machine": asdict(machine),
        "capacity_requests_per_s": rate,
        "overhead": asdict(own),
        "rows": [row.json() for row in rows],
    }


def lines_of(shape: Shape, machine: Machine, rate: float, own: Overhead, rows: Sequence[Row]) -> Iterator[str]:
    """The same for a person to read."""
    cost = machine.cost
    yield (
        f"{shape.requests:,} requests of {shape.clients:,} clients, seed {shape.seed}; a KV cache of "
        f"{machine.kv_tokens:,} tokens; load 1 is {rate:.2f} requests/s"
    )
    yield (
        f"a step: {cost.pass_ms:g} ms, {cost.row_ms:g} a decode row, {cost.token_ms:g} a prompt token, "
        f"{cost.row_key_us:g} and {cost.token_key_us:g} us for each key of one; step_ms {machine.step_ms:g}"
    )
    yield ""
    yield (
        f"{'arrivals':<8} {'load':>4} {'policy':<8} {'mark':>5} {'req/s':>6} {'tok/s':>6}  {'TTFT p50':>8} {'p95':>8} "
        f"{'p99':>8} {'max':>8} {'light':>8} {'urgent':>8}  {'gap p50':>7} {'p95':>6} {'p99':>6} {'max':>7}  "
        f"{'KV':>3} {'peak':>4} {'preempt':>7} {'again':>6} {'cached':>6} {'refused':>7}"
    )
    for row in rows:
        f = row.figures
        mark = "" if row.variant.policy == "reserve" else f"{100 * row.variant.watermark:g} %"
        yield (
            f"{row.arrivals:<8} {row.load:>4g} {row.variant.policy:<8} {mark:>5} {f.requests_per_s:>6.2f} "
            f"{f.tokens_per_s:>6.0f}  {_waits(f.ttft_ms, 8)} {_ms(f.ttft_light_ms.p99, 8)} "
            f"{_ms(f.ttft_urgent_ms.p99, 8)}  {_waits(f.gap_ms, 6)}  {_percent(f.kv_mean, 3)} {_percent(f.kv_peak, 4)} "
            f"{f.preemptions:>7} {100 * f.recomputed:>5.1f}% {_percent(f.cached, 6)} {f.refused:>7}"
        )
    yield ""
    yield (
        "Times in ms. light, urgent: p99 of TTFT for the clients who together send the rarer half, and for requests of "
        "the higher priority. again: of all tokens computed, those computed again after a preemption."
    )
    yield from _waste_lines(rows)
    yield (
        f"The scheduler with {own.live:.0f} live: {own.step_us:.0f} us a step (p99 {own.step_p99_us:.0f}), "
        f"{100 * own.share:.3f} % of it, {own.live_us:.2f} us a live sequence; {own.add_us:.1f} us to add one"
    )
    busiest = max(rows, key=lambda row: row.figures.overhead.share).figures.overhead
    yield (
        f"and at most, in the runs above, with {busiest.live:.1f} live: {busiest.step_us:.0f} us a step, "
        f"{100 * busiest.share:.2f} % of it"
    )


def _waste_lines(rows: Sequence[Row]) -> Iterator[str]:
    for title, reserved in (("blocks taken as needed", False), ("blocks reserved", True)):
        found = [row.figures.waste for row in rows if (row.variant.policy == "reserve") == reserved]
        if found:
            yield f"Unused token slots of a sequence at its end, {title}: {_waste(found[-1], reserved)}"


def _waste(waste: Waste, reserved: bool) -> str:
    mean = f"{waste.mean:.2f} +- {waste.error:.2f}"
    if reserved:
        return mean
    verdict = "within" if waste.as_expected else "not within"
    return (
        f"{mean}, {verdict} three standard errors of (block - 1) / 2 = {waste.expected:g}; one piece a sequence: "
        f"{waste.max_tokens:,.0f} if it is as long as max_tokens allows, {waste.whole_context:,.0f} if as the context"
    )


def _waits(waits: Waits, width: int) -> str:
    return " ".join(_ms(value, width) for value in (waits.p50, waits.p95, waits.p99, waits.max)).rjust(4 * width + 4)


def _ms(value: float | None, width: int) -> str:
    return f"{'-' if value is None else format(value, ',.0f'):>{width}}"


def _percent(share: float, width: int) -> str:
    return f"{100 * share:.0f}%".rjust(width)
