"""Rounds in which the ways take turns, and what is printed and saved of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batching.engine import Stepper, Task
from batching.ways import WAYS, Sample, Way, fitting, sample
from miro_cy.inspect import inspect_model
from miro_cy.loading import Parts
from miro_cy.tools.limits import LimitProbe
from miro_cy.tools.report import Spread
from peers.result import about_run

FORMAT = "miro-batching"
VERSION = 1
#: Tokens a second that eight requests shall reach where reading memory reaches GOAL_GB_PER_S, with float16 weights of
#: GOAL_PARAMETERS; in proportion to what reading reaches in the run.
GOAL_TOKENS_PER_S = 34.0
GOAL_GB_PER_S = 18.0
GOAL_PARAMETERS = (1.0e9, 1.2e9)


@dataclass(frozen=True, slots=True)
class Result:
    """samples: by way, one a round."""

    task: Task
    samples: dict[str, list[Sample]]
    read_gb_per_s: float
    block_size: int
    token_bytes: int
    fit: int

    def ratios(self) -> dict[str, Spread]:
        """Of each round, the median, least and largest: how many times as fast as one at a time, and how many times
        shorter chunks make the gaps.
        """
        speeds = {name: [s.tokens_per_s for s in found] for name, found in self.samples.items()}
        gaps = {name: [s.gap_ms for s in found if s.gap_ms] for name, found in self.samples.items()}
        made = {
            f"{name}_over_naive": Spread.of([a / b for a, b in zip(speeds[name], speeds["naive"], strict=True)])
            for name in ("static", "continuous", "chunked")
        }
        pairs = zip(gaps["continuous"], gaps["chunked"], strict=True)
        return made | {"gap_cut_by_chunks": Spread.of([whole / chunked for whole, chunked in pairs])}


def measure(parts: Parts, task: Task, rounds: int, tell: Callable[[str], None] = lambda text: None) -> Result:
    """One round to warm up, with a few tokens only, and the rounds that count."""
    size, token_bytes = parts.config.block_size, parts.spec.kv_bytes_per_token(parts.kv_dtype)
    steppers = {whole: Stepper(parts, task, whole=whole) for whole in (True, False)}
    probe = LimitProbe(parts.executor.threads)
    short = Task(requests=task.requests, prompt=task.prompt, new=8, long=min(task.long, 4 * task.prompt), sequential=1)
    for way in WAYS:
        tell(f"{way.title}, warming up")
        sample(way, steppers[way.whole], short, token_bytes, size)
    samples: dict[str, list[Sample]] = {way.name: [] for way in WAYS}
    for round_ in range(rounds):
        for way in WAYS:
            tell(f"{way.title}, round {round_ + 1} of {rounds}")
            probe.measure()
            samples[way.name].append(sample(way, steppers[way.whole], task, token_bytes, size))
    return Result(task, samples, probe.best.read_gb_per_s, size, token_bytes, fitting(task, size))


def goal_of(path: Path, read_gb_per_s: float) -> float | None:
    """Tokens a second that are the goal for this model at this bandwidth; None for a model that has none."""
    about = inspect_model(path)
    low, high = GOAL_PARAMETERS
    half = max(about.types, key=lambda name: about.types[name].parameters) in ("F16", "BF16")
    if not (half and low <= about.parameters <= high):
        return None
    return GOAL_TOKENS_PER_S * read_gb_per_s / GOAL_GB_PER_S


def result_of(result: Result, path: Path, threads: int) -> dict[str, Any]:
    """All that is known, as JSON takes it."""
    task = result.task
    return {
        "format": FORMAT,
        "format_version": VERSION,
        **about_run(path, threads),
        "rounds": len(next(iter(result.samples.values()))),
        "task": asdict(task),
        "read_gb_per_s": result.read_gb_per_s,
        "goal_tokens_per_s": goal_of(path, result.read_gb_per_s),
        "rows": [_row(way, result.samples[way.name]) for way in WAYS],
        "ratios": {name: asdict(spread) for name, spread in result.ratios().items()},
        "same_memory": {
            "bytes": task.requests * task.reserve * result.token_bytes,
            "contiguous_sequences": task.requests,
            "paged_sequences": result.fit,
        },
    }


def _row(way: Way, found: Sequence[Sample]) -> dict[str, Any]:
    return {
        "way": way.name,
        "tokens_per_s": asdict(Spread.of([s.tokens_per_s for s in found])),
        "kv_bytes": max(s.kv_bytes for s in found),
        "gap_p99_ms": _spread([s.gap_ms for s in found]),
        "long_ttft_ms": _spread([s.ttft_ms for s in found]),
    }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    found = [value for value in values if value is not None]
    return asdict(Spread.of(found)) if found else None


def lines_of(made: dict[str, Any]) -> Iterator[str]:
    """The same for a person to read."""
    task = made["task"]
    yield (
        f"{made['model']['name']}: {made['miro']['isa']}, {made['threads']} threads, {made['rounds']} rounds; "
        f"{task['requests']} requests of {task['prompt']} + {task['new']} tokens; a prompt of {task['long']:,} arrives "
        "while as many run"
    )
    yield "median (least to most) of the rounds"
    yield f"{'':<26} {'tok/s':>22} {'KV MB':>7} {'p99 gap, ms':>26} {'its first token, s':>22}"
    titles = {way.name: way.title for way in WAYS}
    for row in made["rows"]:
        gap, ttft = _range(row["gap_p99_ms"], 0), _range(row["long_ttft_ms"], 2, 1000)
        yield (
            f"{titles[row['way']]:<26} {_range(row['tokens_per_s'], 1):>22} {row['kv_bytes'] / 1e6:>7.1f} "
            f"{gap:>26} {ttft:>22}"
        )
    for name, words in (
        ("static_over_naive", "static over one at a time"),
        ("continuous_over_naive", "continuous over one at a time"),
        ("chunked_over_naive", "chunked over one at a time"),
        ("gap_cut_by_chunks", "p99 gap, whole prompts over chunks"),
    ):
        yield f"{words:<36} {_range(made['ratios'][name], 2)}"
    same = made["same_memory"]
    more = 100 * (same["paged_sequences"] / same["contiguous_sequences"] - 1)
    yield (
        f"in {same['bytes'] / 1e6:.1f} MB of KV cache: {same['contiguous_sequences']} sequences that reserve "
        f"{task['reserve']} tokens each, {same['paged_sequences']} paged ({more:+.0f} %)"
    )
    goal = made["goal_tokens_per_s"]
    tail = "" if goal is None else f"; goal at that bandwidth: {goal:.1f} tok/s"
    yield f"reading memory: {made['read_gb_per_s']:.1f} GB/s{tail}"


def _range(spread: dict[str, float] | None, digits: int, unit: float = 1.0) -> str:
    if spread is None:
        return "-"
    median, least, most = (format(spread[key] / unit, f",.{digits}f") for key in ("median", "min", "max"))
    return f"{median} ({least} to {most})"
