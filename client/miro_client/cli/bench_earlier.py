"""A report that `miro bench --json` printed earlier, read back from a file that may hold anything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from miro_client.checks import shown
from miro_client.errors import ConfigError

FORMAT = "miro-bench"
VERSION = 1
#: A report has a few kB; bytes and rows of one that is read.
MAX_BYTES = 4 << 20
MAX_ROWS = 4096
#: Characters of a name in it.
MAX_NAME = 400
#: Seconds and bytes that a figure may have.
MAX_FIGURE = 1e15
MIN_SECONDS = 1e-9

#: What must be the same for figures to be comparable, as far as both reports tell: part of the report, and its fields.
IDENTITY = (
    ("machine", ("cpu", "cpus", "isa", "threads")),
    ("model", ("name", "format", "parameters", "file_bytes", "compute", "kv_dtype")),
    ("settings", ("context", "block_size", "max_step_tokens")),
)


class Key(NamedTuple):
    """By which rows of two reports are matched. tokens: of all rows of the work together."""

    work: str
    rows: int
    depth: int
    tokens: int

    @property
    def each(self) -> int:
        """Tokens of one row."""
        return self.tokens // self.rows


@dataclass(frozen=True, slots=True)
class EarlierLoad:
    """Medians."""

    seconds: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Earlier:
    """miro: the version that measured. identity: "machine.isa" and the like, what the report says of it.
    rows: median seconds of each.
    """

    miro: str
    worker: bool
    identity: Mapping[str, str | int]
    rows: Mapping[Key, float]
    load: EarlierLoad | None


def read_earlier(path: str) -> Earlier:
    """Raises ConfigError, saying what is wrong with it, for what is not a report of this version."""
    try:
        report = json.loads(_bytes(path), parse_constant=_no_number)
    except OSError as error:
        raise ConfigError(f"cannot read {path!r:.200}: {error.strerror}", field="compare") from error
    except RecursionError:
        raise ConfigError(f"{path!r:.200} is not a report: it is nested too deeply", field="compare") from None
    except ValueError as error:  # no JSON, no UTF-8, a name with a zero byte, a number of thousands of digits
        raise ConfigError(f"{path!r:.200} is not a report: {error!s:.200}", field="compare") from error
    try:
        return _earlier(report)
    except _Wrong as wrong:
        raise ConfigError(f"{path!r:.200} is not a report that can be compared: {wrong}", field="compare") from None


class _Wrong(Exception):
    """What is wrong with a report."""


def _bytes(path: str) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("it is not a file")
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return data


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no figure")


def _earlier(report: Any) -> Earlier:
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise _Wrong(f"miro bench --json writes an object whose format is {FORMAT!r}")
    if report.get("format_version") != VERSION or isinstance(report["format_version"], bool):
        raise _Wrong(f"its version is {shown(report.get('format_version'), 40)}, this miro reads {VERSION}")
    rows = report.get("rows")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_ROWS:
        raise _Wrong(f"rows must be a list of 1 to {MAX_ROWS}")
    found: dict[Key, float] = {}
    for index, row in enumerate(rows):
        key, seconds = _row(row, f"rows[{index}]")
        if key in found:
            raise _Wrong(f"rows[{index}] is the same work as one before it")
        found[key] = seconds
    load = report.get("load")
    return Earlier(
        miro=_name(report.get("miro"), "miro"),
        worker="worker" in report,
        identity=_identity(report),
        rows=found,
        load=None if load is None else _load(load),
    )


def _identity(report: dict[str, Any]) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for part, fields in IDENTITY:
        values = _object(report.get(part), part)
        for field in fields:
            if field not in values:
                continue
            value = values[field]
            where = f"{part}.{field}"
            found[where] = _whole(value, 0, 2**62, where) if isinstance(value, int) else _name(value, where)
    return found


def _row(value: Any, where: str) -> tuple[Key, float]:
    row = _object(value, where)
    work = row.get("work")
    rows = _whole(row.get("rows"), 1, 256, f"{where}.rows")
    depth = _whole(row.get("depth"), 0, 2**24, f"{where}.depth")
    tokens = _whole(row.get("tokens"), 1, 2**24, f"{where}.tokens")
    if work not in ("prompt", "decode") or tokens % rows:
        raise _Wrong(f"{where} is neither a prompt nor a decode of as many tokens a row")
    if (rows == 1 and depth == 0) if work == "prompt" else (depth and tokens // rows <= 2**16):
        return Key(work, rows, depth, tokens), _median(row.get("seconds"), MIN_SECONDS, f"{where}.seconds")
    raise _Wrong(f"{where} is not a {work} that miro bench measures")


def _load(value: Any) -> EarlierLoad:
    load = _object(value, "load")
    memory = _median(load.get("memory_bytes"), 1, "load.memory_bytes")
    return EarlierLoad(_median(load.get("seconds"), MIN_SECONDS, "load.seconds"), memory)


def _median(value: Any, least: float, where: str) -> float:
    figure = _object(value, where).get("median")
    if isinstance(figure, bool) or not isinstance(figure, int | float) or not least <= figure <= MAX_FIGURE:
        raise _Wrong(f"{where}.median must be a number from {least:g} to {MAX_FIGURE:g}, not {shown(figure, 40)}")
    return float(figure)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where} must be an object")
    return value


def _whole(value: Any, low: int, high: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _Wrong(f"{where} must be a whole number from {low} to {high}")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise _Wrong(f"{where} must be text of at most {MAX_NAME} characters")
    return value
