"""What a comparison prints and saves, and the program around it, with llama.cpp's programs made up."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import compare
from miro_cy._kernels.select import active_isa
from miro_cy.errors import ConfigError
from miro_cy.tools.report import Spread
from peers import result
from peers.engines import config_of, context_of
from peers.measure import Row
from peers.works import Chosen

MODEL = Path(__file__).parents[1] / "data" / "golden" / "gguf" / "Q4_1.gguf"
ROWS = [
    Row("prompt of 8", "tok/s", Spread(5000.25, 4, 6), Spread(2, 2, 2), [2.0, 3.0]),
    Row("attention at 99, a layer", "ms", Spread(0.04, 0.04, 0.04), Spread(-0.1, -0.1, -0.1), []),
]


class Peer:
    name = "llama.cpp"

    def version(self) -> dict[str, str | int]:
        return {"kind": "native", "build_number": 7}


@pytest.fixture
def made() -> dict[str, Any]:
    return result.result_of(ROWS, Peer(), MODEL, threads=2, rounds=5, arithmetic=ARITHMETIC)  # type: ignore[arg-type]


ARITHMETIC = ("fast", active_isa(), "fp16")


def strings(value: Any) -> Iterator[str]:
    """All text in a JSON value, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_a_result_says_what_it_belongs_to(made: dict[str, Any]) -> None:
    made = json.loads(json.dumps(made))
    assert list(made) == [
        *("format", "format_version", "date", "machine", "model", "miro", "llama.cpp", "threads", "rounds", "rows"),
    ]
    assert (made["format"], made["format_version"]) == ("miro-compare", 1)
    assert set(made["machine"]) == {"cpu", "cpus", "memory_bytes", "kernel"}
    assert made["machine"]["memory_bytes"] > 1 << 20
    assert (made["model"]["name"], made["model"]["compute"], made["model"]["kv_dtype"]) == ("Q4_1", "fast", "fp16")
    assert set(made["miro"]) == {"version", "commit", "changed", "build", "isa", "flags"}
    assert made["llama.cpp"] == {"kind": "native", "build_number": 7}
    assert (made["threads"], made["rounds"]) == (2, 5)
    prompt, attention = made["rows"]
    assert prompt == {
        "work": "prompt of 8",
        "unit": "tok/s",
        "miro": {"median": 5000.25, "min": 4, "max": 6},
        "llama.cpp": {"median": 2, "min": 2, "max": 2},
        "ratio": {"median": 2.5, "min": 2.0, "max": 3.0},
        "ratios": [2.0, 3.0],
    }
    assert (attention["ratio"], attention["ratios"]) == (None, [])


def test_flags_are_those_of_the_active_kernels() -> None:
    flags = result.compile_flags(active_isa())
    assert flags is not None
    assert "-O3" in flags["kernels"]
    if active_isa() != "generic":
        assert any(flag.startswith("-march=") for flag in flags["kernels"])
    assert not any(flag.startswith("-march=") for flag in flags["rest"])


def test_a_folder_that_is_no_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result.commit_of(tmp_path) == {"commit": None, "changed": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert result.commit_of(result.ROOT) == {"commit": None, "changed": None}


def test_a_saved_result_holds_no_path_and_overwrites_nothing(made: dict[str, Any], tmp_path: Path) -> None:
    made["machine"]["cpu"] = "Some(R) CPU  @ 2.50GHz/"
    made["date"] = "2026-01-02"
    folder = tmp_path / "results"
    first, second = result.save(made, folder), result.save(made, folder)
    assert first.name == "2026-01-02-q4-1-some-r-cpu-2-50ghz.json"
    assert second.name == "2026-01-02-q4-1-some-r-cpu-2-50ghz-2.json"
    assert json.loads(first.read_text()) == json.loads(json.dumps(made))
    folders = (str(MODEL.parent), str(Path.home()), str(result.ROOT), sys.prefix)
    for text in strings(json.loads(second.read_text())):
        assert not Path(text).is_absolute()
        assert not any(folder in text for folder in folders if folder != "/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("AMD EPYC 7R13", "amd-epyc-7r13"), ("../..", "unknown"), ("", "unknown"), ("É", "unknown"), ("x" * 99, "x" * 60)],
)
def test_slug(text: str, expected: str) -> None:
    assert result.slug(text) == expected


def test_lines(made: dict[str, Any]) -> None:
    heading, explanation, prompt, attention = result.lines_of(made, "llama.cpp")
    assert heading == f"Q4_1: fast, {active_isa()}, 2 threads, 5 rounds; llama.cpp native 7"
    assert "how many times as fast miro is" in explanation
    assert prompt.split("tok/s")[1].split() == [
        *("miro", "5,000.2", "llama.cpp", "2.0", "ratio", "2.50", "(2.00", "to", "3.00)"),
    ]
    assert attention.endswith("ratio none")
    assert prompt.index("llama.cpp") == attention.index("llama.cpp")


def test_the_engine_has_room_for_every_work() -> None:
    assert context_of(Chosen()) == 2048
    assert context_of(Chosen(prompts=(4000,))) == 4001
    config = config_of(MODEL, Chosen(prompts=(99,), requests=(4, 9), depths=(300,)), 1)
    assert (config.max_context, config.max_num_seqs) == (512, 9)
    with pytest.raises(ConfigError, match="needs a context of"):
        config_of(MODEL, Chosen(depths=(500,)), 1)


FAKE = """\
import json, sys
a = sys.argv
at = lambda name: a[a.index(name) + 1]
if "-npl" in a:
    print("noise")
    print(json.dumps({"pp": int(at("-npp")), "tg": int(at("-ntg")), "pl": int(at("-npl")), "speed_tg": 100.0}))
else:
    same = {"build_number": 7, "build_commit": "0a1b2c3", "n_prompt": int(at("-p")), "n_gen": int(at("-n"))}
    print(json.dumps([{**same, "n_depth": int(d), "avg_ts": 50.0 - int(d) / 100} for d in at("-d").split(",")]))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "fake.py").write_text(FAKE)
    for name in ("llama-bench", "llama-batched-bench"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(folder / "fake.py"))} "$@"\n')
        path.chmod(0o755)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(compare.main, [str(MODEL), "--threads", "1", "--rounds", "1", *arguments])


def test_miro_beside_native_programs(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "save", lambda made: result.save(made, tmp_path))
    works = ("--prompt", "9", "--requests", "1-2", "--depth", "40", "--load")
    done = run("--native", str(programs), *works, "--json", "--save")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [(row["work"], row["unit"]) for row in made["rows"]] == [
        ("prompt of 9", "tok/s"),
        ("decode, 1 request", "tok/s"),
        ("decode, 2 requests", "tok/s"),
        ("decode at 40", "tok/s"),
        ("attention at 40, a layer", "ms"),
        ("start to first token", "s"),
    ]
    assert (made["model"]["compute"], made["model"]["kv_dtype"]) == ("fast", "fp16"), "an engine for two at once"
    prompt, one, two, deep, attention, load = made["rows"]
    assert (prompt["llama.cpp"]["median"], one["llama.cpp"]["median"]) == (50.0, 100.0)
    assert deep["llama.cpp"]["median"] == pytest.approx(49.6)
    assert attention["llama.cpp"]["median"] > 0
    assert all(row["miro"]["median"] > 0 for row in (prompt, one, two, deep, load))
    assert made["llama.cpp"] == {"kind": "native", "build_number": 7, "build_commit": "0a1b2c3"}
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text()) == made
    assert saved.name in done.stderr


def test_only_what_was_chosen_is_compared(programs: Path) -> None:
    done = run("--native", str(programs), "--requests", "2")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split("tok/s")[0].strip() for line in done.stdout.splitlines()[2:]] == ["decode, 2 requests"]


def test_what_goes_wrong_is_one_line(programs: Path, tmp_path: Path) -> None:
    (programs / "fake.py").write_text("print('[]')")
    for arguments, words in (
        (("--native", str(programs), "--prompt", "9"), "llama-bench did not print a list of tests"),
        (("--native", str(tmp_path)), "has no llama-bench"),
        (("--native", str(programs), "--prompt", "512"), "needs a context of 513"),
    ):
        done = run(*arguments)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert words in done.stderr
    folder = CliRunner().invoke(compare.main, [str(MODEL.parents[1] / "hf" / "llama"), "--native", str(programs)])
    assert (folder.exit_code, "not a folder" in folder.stderr) == (1, True)
    assert run("--depth", "16").exit_code == 2
