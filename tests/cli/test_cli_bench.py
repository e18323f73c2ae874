"""`miro bench` on real, small models, here and behind a worker's socket."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miro_client.cli import main
from miro_client.cli.console import Progress
from miro_cy import Engine
from miro_cy._kernels import select
from miro_cy.tools import limits, steps
from miro_worker import Worker

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
FAST, EXACT = str(GOLDEN / "gguf" / "Q4_1.gguf"), str(GOLDEN / "hf" / "llama")
QUICK = ["--prompt", "40", "--rows", "1,3", "--depth", "5", "--tokens", "4", "--repeat", "2"]


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "FMA_ROUNDS", 1 << 10)
    monkeypatch.setattr(limits, "DOT_ROUNDS", 1 << 5)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A worker over a small model that runs at most four requests at once."""
    folder = tempfile.mkdtemp(prefix="miro-")
    with Engine.load(FAST, threads=1, max_num_seqs=4) as engine:
        worker = Worker(engine, f"ipc://{folder}/miro.sock")
        worker.start()
        try:
            yield worker.endpoint
        finally:
            worker.stop(0)
            shutil.rmtree(folder)


def test_table(runner: CliRunner) -> None:
    result = runner.invoke(main, ["bench", FAST, *QUICK, "--threads", "1"])
    assert (result.exit_code, result.stderr) == (0, "")
    heading, table = result.stdout.split("\n\n")
    assert heading.startswith("Q4_1: GGUF 3, ")
    assert "compute fast, KV cache fp16, context 512" in heading
    assert ", 1 threads of " in heading
    assert "limits: read " in heading
    titles, *rows = table.splitlines()
    assert titles.split()[:5] == ["work", "tokens", "rows", "depth", "tok/s"]
    assert titles.endswith("nearer limit")
    assert [row.split()[:4] for row in rows] == [
        ["prompt", "40", "1", "0"],
        ["decode", "4", "1", "5"],
        ["decode", "4", "3", "5"],
    ]
    for row in rows:
        speed, least, most = (float(text.replace(",", "")) for text in row.split()[4:7])
        assert 0 < least <= speed <= most
        assert row.split()[-1] in ("compute", "bandwidth")


def test_json_is_one_object(runner: CliRunner) -> None:
    result = runner.invoke(main, ["bench", EXACT, *QUICK, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert list(report) == [
        *("format", "format_version", "miro", "machine", "model", "settings", "limits", "rows", "load", "attention"),
    ]
    assert (report["load"], report["attention"]) == (None, [])
    assert (report["model"]["name"], report["model"]["compute"]) == ("llama", "exact")
    assert [row["work"] for row in report["rows"]] == ["prompt", "decode", "decode"]


def test_options_reach_the_engine(runner: CliRunner) -> None:
    options = ["--compute", "exact", "--kv-dtype", "fp32", "--max-context", "64", "--threads", "2"]
    report = json.loads(runner.invoke(main, ["bench", FAST, *QUICK, *options, "--json"]).stdout)
    assert (report["model"]["compute"], report["model"]["kv_dtype"]) == ("exact", "fp32")
    assert (report["settings"]["context"], report["machine"]["threads"]) == (64, 2)


def test_compute_mode_in_tiles(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported as what it is, or refused before any work where the machine has no tile registers."""
    asked = ["bench", FAST, *QUICK, "--compute", "bf16"]
    if select.has_tiles():
        report = json.loads(runner.invoke(main, [*asked, "--json"]).stdout)
        assert (report["model"]["compute"], report["model"]["kv_dtype"]) == ("bf16", "bf16")
        assert report["machine"]["isa"] == select.TILES
        assert "compute bf16, KV cache bf16" in runner.invoke(main, asked).stdout
    monkeypatch.setattr("miro_cy.loading.has_tiles", lambda: False)
    result = runner.invoke(main, asked)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs tile registers" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [""],
        [FAST, "--connect", "default"],
        [FAST, "--rows", "0"],
        [FAST, "--rows", "257"],
        [FAST, "--rows", "8-1"],
        [FAST, "--rows", "1,,2"],
        [FAST, "--depth", "1-1000000"],
        [FAST, "--compare", "no-such-file"],
        [FAST, "--compare", str(GOLDEN)],
        [FAST, "--compare", FAST],
        [FAST, "--compare", ""],
        ["--connect", "ipc://a", "--load"],
        ["--connect", "ipc://a", "--compare", "no-such-file"],
        [FAST, "--prompt", str(10**30)],
        ["--connect", "ipc://a", "--prompt", str(10**30)],
        ["--connect", "ipc://a", "--depth", str(2**24 + 1)],
        [FAST, "--prompt", "512"],
        [FAST, "--depth", "510"],
        [FAST, "--compute", "exact", "--kv-dtype", "fp16"],
        [FAST, "--compute", "fast", "--kv-dtype", "bf16"],
        [FAST, "--rows", "1-4", "--kv-dtype", "bf16"],
        [EXACT, "--kv-dtype", "bf16"],
        [FAST, "--max-context", "1024"],
        [FAST, "--repeat", "0"],
        [FAST, "again"],
        ["--connect", "somewhere"],
        ["--connect", "ipc://a", "--threads", "1"],
        ["--connect", "ipc://a", "--compute", "fast"],
        ["--connect", "ipc://a", "--kv-dtype", "fp16"],
        ["--connect", "ipc://a", "--max-context", "64"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(runner: CliRunner, arguments: list[str]) -> None:
    result = runner.invoke(main, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr


def test_a_missing_model_is_status_1(runner: CliRunner) -> None:
    result = runner.invoke(main, ["bench", "no-such-model"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("miro: error: no model file 'no-such-model'")
    assert result.stderr.count("\n") == 1


def test_interrupt_closes_the_engine(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Engine] = []
    close = Engine.close

    def interrupted(self: Any, work: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.StepBench, "run", interrupted)
    monkeypatch.setattr(Engine, "close", lambda self: (closed.append(self), close(self)))
    result = runner.invoke(main, ["bench", FAST, *QUICK])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")
    assert closed


def interrupted(prelude: str, arguments: list[str]) -> tuple[int, bytes, bytes]:
    """Run `miro bench` in a process of its own and interrupt it once it has printed "begun"."""
    paths = [str(ROOT / part) for part in ("", "worker", "client")]
    command = f"from miro_client.cli import main; main({['bench', *arguments]!r})"
    code = f"import sys; sys.path[:0] = {paths!r}\n{prelude}\n{command}"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    return process.returncode, out, err


LONG = ["--repeat", "1000", "--tokens", "400", "--rows", "1"]


@pytest.mark.timeout(60)
def test_real_interrupt() -> None:
    prelude = """
from miro_cy.tools import limits, steps
limits.READ_BYTES = 1 << 20
warm_up = steps.StepBench.warm_up
def begun(self):
    warm_up(self)
    print("begun", flush=True)
steps.StepBench.warm_up = begun
"""
    assert interrupted(prelude, [FAST, *LONG]) == (130, b"", b"")


@pytest.mark.timeout(60)
def test_real_interrupt_while_a_worker_is_measured(endpoint: str) -> None:
    prelude = """
from miro_client.cli import bench_worker
listen, told = bench_worker._Window.listen, []
def begun(self, stream):
    if not told:
        told.append(True)
        print("begun", flush=True)
    return listen(self, stream)
bench_worker._Window.listen = begun
"""
    assert interrupted(prelude, ["--connect", endpoint, *LONG]) == (130, b"", b"")


def test_a_worker_is_measured_through_its_socket(runner: CliRunner, endpoint: str) -> None:
    result = runner.invoke(main, ["bench", "--connect", endpoint, *QUICK, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["format"], report["format_version"]) == ("miro-bench", 1)
    assert list(report) == [
        *("format", "format_version", "miro", "worker", "machine", "model", "settings", "rows", "attention"),
    ]
    assert report["worker"]["endpoint"] == endpoint
    assert report["machine"]["threads"] == 1
    assert (report["model"]["name"], report["model"]["compute"], report["model"]["kv_dtype"]) == (
        "Q4_1",
        "fast",
        "fp16",
    )
    assert report["settings"] == {"repeat": 2, "tokens": 4, "context": 512, "block_size": 32}
    assert [(r["work"], r["rows"], r["depth"], r["tokens"]) for r in report["rows"]] == [
        ("prompt", 1, 0, 40),
        ("decode", 1, 5, 4),
        ("decode", 3, 5, 12),
    ]
    for row in report["rows"]:
        assert set(row) == {"work", "rows", "depth", "tokens", "seconds", "tokens_per_second"}
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert math.isclose(row["tokens_per_second"], row["tokens"] / row["seconds"]["median"])
    table = runner.invoke(main, ["bench", "--connect", endpoint, *QUICK])
    assert (table.exit_code, table.stderr) == (0, "")
    assert table.stdout.splitlines()[4].split() == ["work", "tokens", "rows", "depth", "tok/s", "least", "most"]


def test_a_worker_that_runs_fewer_requests_at_once_is_not_measured(runner: CliRunner, endpoint: str) -> None:
    result = runner.invoke(main, ["bench", "--connect", endpoint, "--rows", "5", "--repeat", "1"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "before 5 ran at once" in result.stderr


def test_what_a_worker_has_no_context_for(runner: CliRunner, endpoint: str) -> None:
    result = runner.invoke(main, ["bench", "--connect", endpoint, "--depth", "480"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs a context of 513 tokens, the worker's is 512" in result.stderr
    result = runner.invoke(main, ["bench", "--connect", endpoint, "--prompt", "40", "--prompt", "512"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a prompt of 512 tokens needs a context of 513 tokens, the worker's is 512" in result.stderr
    result = runner.invoke(main, ["bench", "--connect", endpoint, "--rows", "65"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs 65 requests at once, the worker takes 64 of one client" in result.stderr


def test_progress_is_for_terminals_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[K"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress("")
        for text in ("one", "one", "two"):
            progress.show(text)
        progress.clear()
        progress.clear()
        assert stream.getvalue() == expected


def test_profile(runner: CliRunner) -> None:
    result = runner.invoke(main, ["bench", FAST, *QUICK, "--profile", "--threads", "1"])
    assert (result.exit_code, result.stderr) == (0, "")
    _, _, prompt, *decodes = result.stdout.split("\n\n")
    assert prompt.startswith("prompt of 1 x 40 tokens, milliseconds a step:\n")
    assert len(decodes) == 2
    shares = [float(line.split()[2]) for line in prompt.splitlines()[1:]]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert shares == sorted(shares, reverse=True)
    assert runner.invoke(main, ["bench", "--connect", "default", "--profile"]).exit_code == 2


def test_rows_and_depths_in_one_value(runner: CliRunner) -> None:
    arguments = [
        "--prompt",
        "8",
        "--rows",
        "1-2,4",
        "--depth",
        "5,9",
        "--tokens",
        "2",
        "--repeat",
        "1",
        "--threads",
        "1",
    ]
    result = runner.invoke(main, ["bench", FAST, *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    _, table, lines = result.stdout.split("\n\n")
    assert [row.split()[2:4] for row in table.splitlines()[2:]] == [
        [rows, depth] for depth in ("5", "9") for rows in ("1", "2", "4")
    ]
    assert [line.partition(":")[0] for line in lines.splitlines()] == [
        "attention, 1 row", "attention, 2 rows", "attention, 4 rows",
    ]  # fmt: skip
    assert "more at depth 9 than at depth 5" in lines


@pytest.fixture
def earlier(runner: CliRunner, tmp_path: Path) -> Path:
    """A report of small works, and of loading."""
    result = runner.invoke(main, ["bench", FAST, *QUICK, "--threads", "1", "--load", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    path = tmp_path / "earlier.json"
    path.write_text(result.stdout)
    return path


def test_compare_measures_the_works_of_the_earlier_report(runner: CliRunner, earlier: Path) -> None:
    before = json.loads(earlier.read_text())
    result = runner.invoke(
        main, ["bench", FAST, "--compare", str(earlier), "--threads", "1", "--repeat", "1", "--json"]
    )
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    compared = report["compare"]
    assert (compared["differences"], compared["only_now"], compared["only_earlier"]) == ([], [], [])
    assert report["settings"]["tokens"] == 4
    for now, then, found in zip(report["rows"], before["rows"], compared["rows"], strict=True):
        assert (now["work"], now["rows"], now["depth"], now["tokens"]) == tuple(found.values())[:4]
        assert found["tokens_per_second"] == pytest.approx(then["tokens_per_second"])
        assert found["ratio"] == pytest.approx(now["tokens_per_second"] / then["tokens_per_second"])
    seconds = [made["load"]["seconds"]["median"] for made in (report, before)]
    assert compared["load"]["seconds_ratio"] == pytest.approx(seconds[0] / seconds[1])


def test_compare_with_works_of_its_own_tells_what_has_no_partner(runner: CliRunner, earlier: Path) -> None:
    arguments = ["--compare", str(earlier), *QUICK[:-2], "--rows", "2", "--repeat", "1", "--threads", "2"]
    result = runner.invoke(main, ["bench", FAST, *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    heading, table = result.stdout.split("\n\n")
    assert "warning: not the same conditions: machine.threads is 2, earlier 1" in heading
    titles, prompt, one, three, two, *rest = table.splitlines()
    assert titles.split()[7:9] == ["earlier", "ratio"]
    assert all(float(line.split()[8]) >= 0 for line in (prompt, one, three))  # a number, not a dash
    assert two.split()[7:9] == ["-", "-"]
    assert rest == ["not measured earlier: decode of 2 x 4 at depth 5"]
    result = runner.invoke(
        main, ["bench", FAST, "--compare", str(earlier), "--prompt", "9", "--rows", "1", "--repeat", "1"]
    )
    assert "load" not in result.stdout
    assert "measured earlier only: prompt of 40; decode of 1 x 4 at depth 5; decode of 3 x 4" in result.stdout


def test_works_of_an_earlier_report_that_this_context_does_not_hold(runner: CliRunner, earlier: Path) -> None:
    result = runner.invoke(main, ["bench", FAST, "--compare", str(earlier), "--max-context", "20"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "prompt of 40 needs a context of 41 tokens, this is 20" in result.stderr


def test_a_worker_is_compared_with_an_engine(runner: CliRunner, endpoint: str, earlier: Path) -> None:
    result = runner.invoke(main, ["bench", "--connect", endpoint, "--compare", str(earlier), "--repeat", "1", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    compared = json.loads(result.stdout)["compare"]
    assert compared["differences"] == [{"field": "measured", "now": "a worker", "earlier": "an engine"}]
    assert (len(compared["rows"]), compared["load"]) == (3, None)


def test_load(runner: CliRunner) -> None:
    result = runner.invoke(main, ["bench", FAST, *QUICK, "--load", "--threads", "1"])
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.split("\n\n")[2].splitlines()
    assert line.startswith("load: ")
    assert " resident (" in line
    assert " beside a KV pool of " in line


def test_names_in_an_earlier_report_do_not_reach_the_terminal_as_they_are(
    runner: CliRunner, earlier: Path, tmp_path: Path
) -> None:
    made = json.loads(earlier.read_text())
    made["miro"] = made["machine"]["cpu"] = "\x1b[2J\r\n\ud800"
    earlier.write_text(json.dumps(made))
    for arguments in ([], ["--json"]):
        result = runner.invoke(main, ["bench", FAST, "--compare", str(earlier), "--repeat", "1", *arguments])
        assert (result.exit_code, result.stderr) == (0, "")
        assert "\x1b" not in result.stdout
        assert "\r" not in result.stdout


def test_one_row_at_a_depth_that_nearly_fills_the_context(runner: CliRunner, smollm2_path: Path) -> None:
    arguments = ["--prompt", "8", "--rows", "1", "--depth", "1900", "--tokens", "64", "--max-context", "2048"]
    result = runner.invoke(main, ["bench", str(smollm2_path), *arguments, "--repeat", "1", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    row = json.loads(result.stdout)["rows"][1]
    assert (row["rows"], row["depth"], row["tokens"], row["steps"]) == (1, 1900, 64, 64)
