"""Reading a report back from a file that may hold anything."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_reports import report, row, spread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_client.cli.bench_earlier import MAX_BYTES, MAX_FIGURE, Key, read_earlier
from miro_client.errors import ConfigError

Write = Callable[[Any], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(value: Any) -> str:
        path = tmp_path / "earlier.json"
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return str(path)

    return write


def test_what_a_report_holds(write: Write) -> None:
    load = {"seconds": spread(2), "memory_bytes": spread(3000), "pool_bytes": 7}
    made = report(row("prompt", 1, 0, 40, 0.5), row("decode", 3, 5, 12, 2), load=load, something_new=[1])
    earlier = read_earlier(write(made))
    assert (earlier.miro, earlier.worker) == ("9.9.9", False)
    assert earlier.rows == {Key("prompt", 1, 0, 40): 0.5, Key("decode", 3, 5, 12): 2.0}
    assert Key("decode", 3, 5, 12).each == 4
    assert earlier.load is not None
    assert (earlier.load.seconds, earlier.load.memory_bytes) == (2.0, 3000.0)
    assert earlier.identity["machine.isa"] == "v3"
    assert earlier.identity["model.file_bytes"] == 4000
    assert "settings.repeat" not in earlier.identity


def test_a_workers_report_holds_less(write: Write) -> None:
    made = report(machine={"isa": "v3", "threads": 2}, worker={"endpoint": "ipc://x"})
    earlier = read_earlier(write(made))
    assert earlier.worker
    assert "machine.cpu" not in earlier.identity


def decode(**changes: Any) -> dict[str, Any]:
    return report(row("decode", 3, 5, 12, 2) | changes)


WRONG: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"work tokens rows",
    "no UTF-8": b'{"format": "\xff\xfe"}',
    "cut off": json.dumps(report()).encode()[:-1],
    "two objects": json.dumps(report()).encode() * 2,
    "nested": b"[" * 200_000,
    "a long number": b'{"format_version": ' + b"9" * 10_000 + b"}",
    "a list": [report()],
    "null": None,
    "another format": report(format="miro-compare"),
    "no format": {"format_version": 1},
    "a later version": report(format_version=2),
    "true": report(format_version=True),
    "no version": {"format": "miro-bench"},
    "a version of another kind": report(format_version=["1" * 9999]),
    "no miro": report(miro=None),
    "a long version": report(miro="9" * 9999),
    "no machine": report(machine=None),
    "a machine that is a list": report(machine=["v3"]),
    "no settings": report(settings=7),
    "threads are text of another kind": report(machine_threads=[2]),
    "threads are true": report(machine_threads=True),
    "threads are null": report(machine_threads=None),
    "threads below 0": report(machine_threads=-1),
    "a huge model": report(model_parameters=10**30),
    "a long name": report(model_name="n" * 401),
    "rows are an object": report(rows={}),
    "no rows": report(rows=[]),
    "too many rows": report(rows=[row("decode", 1, 1, n, 1.0) for n in range(1, 4098)]),
    "a row that is none": report(rows=[7]),
    "the same work twice": report(row("prompt", 1, 0, 40, 0.5), row("prompt", 1, 0, 40, 0.6)),
    "another work": decode(work="encode"),
    "a work that is a list": decode(work=[]),
    "a prompt of three rows": decode(work="prompt"),
    "a decode at 0": decode(depth=0),
    "tokens that rows do not share": decode(tokens=13),
    "rows as text": decode(rows="3"),
    "257 rows": decode(rows=257, tokens=257),
    "half a row": decode(rows=1.5),
    "a huge depth": decode(depth=10**400),
    "too many tokens": decode(rows=1, tokens=2**16 + 1),
    "no seconds": decode(seconds=None),
    "no median": decode(seconds={}),
    "no time at all": decode(seconds={"median": 0}),
    "negative seconds": decode(seconds={"median": -1.0}),
    "seconds as text": decode(seconds={"median": "1"}),
    "seconds that are true": decode(seconds={"median": True}),
    "huge seconds": decode(seconds={"median": 10**400}),
    "many seconds": decode(seconds={"median": 2 * MAX_FIGURE}),
    "infinite": b'{"format": Infinity}',
    "1e999": json.dumps(decode(seconds={"median": 7.25})).replace("7.25", "1e999").encode(),
    "not a number": json.dumps(decode(seconds={"median": 7.25})).replace("7.25", "NaN").encode(),
    "a load that is none": report(load=7),
    "a load without seconds": report(load={"memory_bytes": spread(7)}),
    "a load of no memory": report(load={"seconds": spread(1), "memory_bytes": spread(0)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_a_report_is_refused(write: Write, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_earlier(write(WRONG[name]))
    assert error.value.field == "compare"
    assert "is not a report" in error.value.message
    assert len(error.value.message) < 700
    assert error.value.message.isprintable()


def test_what_cannot_be_read(tmp_path: Path, write: Write) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (str(tmp_path / "missing"), "No such file"),
        (str(tmp_path), "not a file"),
        (str(tmp_path / "pipe"), "not a file"),
        ("/dev/zero", "not a file"),
        ("a\0b", "embedded null"),
        ("", "No such file"),
        (write(b" " * (MAX_BYTES + 1)), f"more than {MAX_BYTES} bytes"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_earlier(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
PLACES = [(key,) for key in report()] + [
    *(("machine", key) for key in report()["machine"]),
    *(("model", key) for key in report()["model"]),
    *(("rows", 0, key) for key in report()["rows"][0]),
    ("rows", 0, "seconds", "median"),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_any_value_in_any_place_is_read_or_refused(write: Write, place: tuple[Any, ...], value: Any) -> None:
    made = report(row("decode", 3, 5, 12, 2))
    target: Any = made
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    seconds = [1.0]
    with contextlib.suppress(ConfigError):
        seconds = list(read_earlier(write(made)).rows.values())
    assert all(0 < figure <= MAX_FIGURE for figure in seconds)
