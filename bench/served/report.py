"""Rounds in which the systems take turns, and what is printed and saved of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miro_cy.tools.report import Spread
from peers.result import about_run
from peers.works import PeerError
from served.prompts import Prompts
from served.systems import Served
from served.works import Intruding, Intrusion, Load, Sharing, intrude, share

FORMAT = "miro-serving"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Results:
    """By system, one a round. expected: prompt tokens that all requests but the first can take from others."""

    intrusions: dict[str, list[Intrusion]]
    sharings: dict[str, list[Sharing]]
    expected: list[int]


def measure(
    systems: Sequence[Served],
    load: Load,
    prompts: Prompts,
    block_size: int,
    rounds: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Results:
    """A round to warm up, of a few words, and the rounds that count. The first system is miro: what it says of cached
    tokens must be right to the token in each round, else PeerError.
    """
    short = Load(streams=load.streams, stream_words=8, stream_new=load.stream_new, long_words=64)
    asked = Intruding.draw(short, prompts)
    for system in systems:
        tell(f"{system.name}, warming up")
        intrude(system, short, asked)
    made = Results({s.name: [] for s in systems}, {s.name: [] for s in systems}, [])
    for round_ in range(rounds):
        asked = Intruding.draw(load, prompts)
        for system in systems:
            tell(f"{system.name}, a long prompt among streams, round {round_ + 1} of {rounds}")
            made.intrusions[system.name].append(intrude(system, load, asked))
        sharing, expected = prompts.sharing(load.requests, load.prefix_words, load.words, block_size)
        made.expected.append(expected)
        for system in systems:
            tell(f"{system.name}, a common beginning, round {round_ + 1} of {rounds}")
            made.sharings[system.name].append(share(system, load, sharing))
        check_cached(made.sharings[systems[0].name][-1].cached, expected)
    return made


def check_cached(cached: Sequence[int] | None, expected: int) -> None:
    """Raise PeerError unless one request, the first, had to compute everything and every other took what it could."""
    if not cached or cached[0] != 0 or any(n != expected for n in cached[1:]):
        raise PeerError(f"cached tokens should be 0 once and {expected} for all others, not {cached}")


def result_of(made: Results, load: Load, path: Path, threads: int, systems: Sequence[Served]) -> dict[str, Any]:
    """All that is known, as JSON takes it."""
    miro, *others = (system.name for system in systems)
    shared = {name: [s.seconds for s in found] for name, found in made.sharings.items()}
    gaps = {name: [i.gap_max_ms for i in found] for name, found in made.intrusions.items()}
    return {
        "format": FORMAT,
        "format_version": VERSION,
        **about_run(path, threads, *systems[1:]),
        "rounds": len(made.expected),
        "load": asdict(load),
        "long_prompt": {name: _intrusion(found) for name, found in made.intrusions.items()},
        "common_beginning": {name: _sharing(found) for name, found in made.sharings.items()},
        "expected_cached": made.expected,
        "ratios": {
            name: {"gap_max": _ratio(gaps[name], gaps[miro]), "seconds": _ratio(shared[name], shared[miro])}
            for name in others
        },
    }


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of([a / b for a, b in zip(theirs, ours, strict=True)]))


def _intrusion(found: Sequence[Intrusion]) -> dict[str, Any]:
    fields = ("gap_p99_ms", "gap_max_ms", "ttft_ms", "alone_ms")
    spreads = {name: asdict(Spread.of([getattr(i, name) for i in found])) for name in fields}
    return spreads | {"ttft_over_alone": asdict(Spread.of([i.ttft_ms / i.alone_ms for i in found]))}


def _sharing(found: Sequence[Sharing]) -> dict[str, Any]:
    return {
        "seconds": asdict(Spread.of([s.seconds for s in found])),
        "ttft_p99_ms": asdict(Spread.of([s.ttft_p99_ms for s in found])),
        "cached": [s.cached for s in found],
    }


def lines_of(made: dict[str, Any]) -> Iterator[str]:
    """The same for a person to read."""
    load = made["load"]
    yield (
        f"{made['model']['name']}: {made['miro']['isa']}, {made['threads']} threads, {made['rounds']} rounds; "
        "median (least to most)"
    )
    yield f"{load['streams']} streams run, a prompt of {load['long_words']:,} words arrives:"
    for name, row in made["long_prompt"].items():
        yield (
            f"  {name:<13} gaps p99 {_range(row['gap_p99_ms'], 0)} ms, max {_range(row['gap_max_ms'], 0)} ms; "
            f"its first token {_range(row['ttft_ms'], 2, 1000)} s, alone {_range(row['alone_ms'], 2, 1000)} s, "
            f"ratio {_range(row['ttft_over_alone'], 2)}"
        )
    yield (
        f"{load['users']} users, {load['requests']} requests that begin with the same {load['prefix_words']} words, "
        f"{load['new']} tokens each:"
    )
    for name, row in made["common_beginning"].items():
        yield f"  {name:<13} {_range(row['seconds'], 2)} s in all, TTFT p99 {_range(row['ttft_p99_ms'], 0)} ms"
    counts = ", ".join(dict.fromkeys(str(n) for n in made["expected_cached"]))
    yield f"  cached tokens as they should be: 0 for the first request of a round, {counts} for each other"
    for name, ratio in made["ratios"].items():
        yield (
            f"{name} takes {_range(ratio['seconds'], 2)} times as long for the common beginning; its longest gap is "
            f"{_range(ratio['gap_max'], 1)} times miro's"
        )


def _range(spread: dict[str, float], digits: int, unit: float = 1.0) -> str:
    median, least, most = (format(spread[key] / unit, f",.{digits}f") for key in ("median", "min", "max"))
    return f"{median} ({least} to {most})"
