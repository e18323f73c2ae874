"""What is computed from the figures of a report: attention's own cost, and how they differ from earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miro_client.cli.bench_earlier import IDENTITY, Earlier, Key


def key_of(row: dict[str, Any]) -> Key:
    """Of a report's row."""
    return Key(*(row[field] for field in Key._fields))


def attention(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds that attention takes a layer and token more at each depth than at the least one, for works that
    differ in depth alone: all else that a step does is the same at every depth.
    """
    layers = report["model"]["layers"]
    groups: dict[tuple[int, int], dict[int, float]] = {}
    for row in report["rows"]:
        if row["work"] == "decode":
            groups.setdefault((row["rows"], row["tokens"]), {})[row["depth"]] = row["seconds"]["median"]
    found = []
    for (rows, tokens), seconds in groups.items():
        least, *deeper = sorted(seconds)
        for depth in deeper if layers else ():  # a worker of an early version does not tell
            more = 1e3 * (seconds[depth] - seconds[least]) / tokens / layers
            found.append({"rows": rows, "depth": depth, "than_depth": least, "ms_per_layer_token": more})
    return found


def compare(report: dict[str, Any], earlier: Earlier) -> dict[str, Any]:
    """The field `compare` of a report. Ratios are now over earlier, of tokens a second or of the figure named."""
    rows, only_now = [], []
    for row in report["rows"]:
        key = key_of(row)
        if key not in earlier.rows:
            only_now.append(key._asdict())
            continue
        speed = key.tokens / earlier.rows[key]
        rows.append({**key._asdict(), "tokens_per_second": speed, "ratio": row["tokens_per_second"] / speed})
    measured = {key_of(row) for row in report["rows"]}
    return {
        "miro": earlier.miro,
        "differences": list(_differences(report, earlier)),
        "rows": rows,
        "only_now": only_now,
        "only_earlier": [key._asdict() for key in earlier.rows if key not in measured],
        "load": _compare_load(report.get("load"), earlier),
    }


def _differences(report: dict[str, Any], earlier: Earlier) -> Iterator[dict[str, Any]]:
    if (worker := "worker" in report) != earlier.worker:
        kinds = ("a worker" if kind else "an engine" for kind in (worker, earlier.worker))
        yield dict(zip(("field", "now", "earlier"), ("measured", *kinds), strict=True))
    for part, fields in IDENTITY:
        for field in fields:
            now, before = report[part].get(field), earlier.identity.get(f"{part}.{field}")
            if None not in (now, before) and now != before:
                yield {"field": f"{part}.{field}", "now": now, "earlier": before}


def _compare_load(load: dict[str, Any] | None, earlier: Earlier) -> dict[str, float] | None:
    if load is None or earlier.load is None:
        return None
    return {
        "seconds": earlier.load.seconds,
        "seconds_ratio": load["seconds"]["median"] / earlier.load.seconds,
        "memory_bytes": earlier.load.memory_bytes,
        "memory_ratio": load["memory_bytes"]["median"] / earlier.load.memory_bytes,
    }
