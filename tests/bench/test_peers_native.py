"""What llama.cpp's programs print, as recorded and otherwise, and how they are run."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from peers import native
from peers.native import Native, build_of, parse_batched, parse_bench, run_program, speed_of
from peers.works import NEW, SHORT, PeerError


def test_of(n_prompt: int, n_gen: int, n_depth: int, speed: Any) -> dict[str, Any]:
    return {
        "build_commit": "0a1b2c3",
        "build_number": 1234,
        "cpu_info": "A CPU",
        "model_filename": "/models/a model.gguf",
        "n_threads": 2,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "avg_ns": 1000,
        "avg_ts": speed,
        "samples_ts": [speed],
    }


test_of.__test__ = False  # type: ignore[attr-defined]


def batched(requests: int, speed: Any, tokens: int = NEW) -> str:
    row = {"n_kv_max": 2048, "n_threads": 2, "pp": SHORT, "tg": tokens, "pl": requests, "n_kv": 640}
    return json.dumps(row | {"t_pp": 0.1, "speed_pp": 160.0, "t_tg": 2.0, "speed_tg": speed, "speed": 99.0})


def test_speeds_of_recorded_tests() -> None:
    tests = parse_bench(json.dumps([test_of(0, 64, 16, 50.0), test_of(0, 64, 1900, 40), test_of(512, 0, 0, 900.5)]))
    assert speed_of(tests, 0, 64, 1900) == 40.0
    assert speed_of(tests, 512, 0, 0) == 900.5
    assert build_of(tests[0]) == {"build_number": 1234, "build_commit": "0a1b2c3"}
    for wanted in ((0, 64, 17), (512, 64, 0), (0, 0, 0)):
        with pytest.raises(PeerError, match="reports 0 tests"):
            speed_of(tests, *wanted)
    with pytest.raises(PeerError, match="reports 2 tests"):
        speed_of(tests + tests, 512, 0, 0)


@pytest.mark.parametrize(
    "text",
    ["", "error: no model", "[", "[]", "{}", "7", "null", "[7]", "[" * 100_000, '[{"n_prompt": ', "[{}] [{}]"],
    ids=lambda text: text[:20] or "nothing",
)
def test_what_is_no_list_of_tests(text: str) -> None:
    with pytest.raises(PeerError, match="llama-bench did not print") as error:
        parse_bench(text)
    assert len(str(error.value)) < 200


SPEEDS: list[Any] = [None, 0, 0.0, -1.0, True, "50", [50], {}, float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("speed", SPEEDS, ids=repr)
def test_what_is_no_speed(speed: Any) -> None:
    with pytest.raises(PeerError, match="llama-bench reports no speed"):
        speed_of(parse_bench(json.dumps([test_of(8, 0, 0, speed)])), 8, 0, 0)
    with pytest.raises(PeerError, match="llama-batched-bench reports no speed"):
        parse_batched(batched(8, speed), 8)


@pytest.mark.parametrize("build", [{}, {"build_number": "7"}, {"build_number": True}, {"build_commit": 7}])
def test_a_build_that_does_not_say_which_it_is(build: dict[str, Any]) -> None:
    whole = {"build_number": 1, "build_commit": "0a1b2c3"} if build else {}
    with pytest.raises(PeerError, match="which build"):
        build_of(whole | build)
    with pytest.raises(PeerError, match="which build"):
        build_of({"build_number": 1, "build_commit": "x" * 101})


def test_speed_of_requests_among_other_lines() -> None:
    text = "\n".join(["", "main: n_kv_max = 2048", batched(1, 70.0), batched(8, 300.25), "", "llama_perf: 1 ms"])
    assert parse_batched(text, 8) == 300.25
    assert parse_batched(text, 1) == 70.0
    with pytest.raises(PeerError, match="reports 0 results"):
        parse_batched(text, 16)
    with pytest.raises(PeerError, match="reports 0 results"):
        parse_batched(batched(8, 300.0, tokens=1), 8)
    with pytest.raises(PeerError, match="reports 2 results"):
        parse_batched(f"{batched(8, 1.0)}\n{batched(8, 2.0)}", 8)
    with pytest.raises(PeerError, match="reports 0 results"):
        parse_batched("| PP | TG |", 8)
    for broken in (batched(8, 300.0)[:-3], '{"pp": ' * 50_000):
        with pytest.raises(PeerError, match="printed half a result"):
            parse_batched(broken, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two programs that nothing runs."""
    for name in (native.BENCH, native.BATCHED):
        (tmp_path / name).touch()
    return tmp_path


def test_programs_are_asked_for_one_repetition_of_what_is_measured(folder: Path) -> None:
    asked: list[list[str]] = []
    answers = iter([
        json.dumps([test_of(256, 0, 0, 900.0)]),
        json.dumps([test_of(0, NEW, 16, 50.0), test_of(0, NEW, 1900, 40.0)]),
        batched(8, 300.0),
        json.dumps([test_of(0, 1, 0, 50.0)]),
    ])  # fmt: skip

    def run(command: list[str]) -> str:
        asked.append(command)
        return next(answers)

    peer = Native(folder, Path("/models/m.gguf"), 2, run)
    assert peer.prompt(256) == 900.0
    assert peer.depths((16, 1900)) == [1 / 50, 1 / 40]
    assert peer.decode(8) == 300.0
    assert peer.load() > 0
    assert peer.version() == {"kind": "native", "build_number": 1234, "build_commit": "0a1b2c3"}
    common = ["-m", "/models/m.gguf", "-t", "2"]
    one = ["-r", "1", "-o", "json"]
    requests = ["-tb", "2", "-c", "2048", "-npp", "16", "-ntg", "64", "-npl", "8", "--output-format", "jsonl"]
    assert asked == [
        [str(folder / "llama-bench"), *common, "-p", "256", "-n", "0", "-d", "0", *one],
        [str(folder / "llama-bench"), *common, "-p", "0", "-n", "64", "-d", "16,1900", *one],
        [str(folder / "llama-batched-bench"), *common, *requests],
        [str(folder / "llama-bench"), *common, "-p", "0", "-n", "1", "-d", "0", *one, "--no-warmup"],
    ]


def test_the_version_is_asked_for_when_nothing_told_it(folder: Path) -> None:
    answers = iter([batched(1, 70.0), json.dumps([test_of(0, 1, 0, 9.0)])])
    peer = Native(folder, Path("m.gguf"), 1, lambda command: next(answers))
    peer.decode(1)
    assert peer.version()["build_number"] == 1234


def test_a_folder_without_a_program(folder: Path, tmp_path: Path) -> None:
    (folder / native.BATCHED).unlink()
    with pytest.raises(PeerError, match="has no llama-batched-bench"):
        Native(folder, Path("m.gguf"), 1)


def program(path: Path, text: str) -> list[str]:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_running_programs(tmp_path: Path) -> None:
    assert run_program([*program(tmp_path / "good", 'echo "$1"; echo noise >&2'), "[1]"]) == "[1]\n"
    with pytest.raises(PeerError, match=r"^bad ended with status 3: the last word$"):
        run_program(program(tmp_path / "bad", "echo first >&2; echo 'the last word' >&2; exit 3"))
    with pytest.raises(PeerError, match=r"^silent ended with status 1: it says nothing$"):
        run_program(program(tmp_path / "silent", "exit 1"))
    with pytest.raises(PeerError, match=r"^cannot run missing: No such file"):
        run_program([str(tmp_path / "missing")])
    (tmp_path / "plain").touch()
    with pytest.raises(PeerError, match=r"^cannot run plain: Permission denied"):
        run_program([str(tmp_path / "plain")])
    assert run_program(program(tmp_path / "bytes", r"printf '\377'")) == "\ufffd"
