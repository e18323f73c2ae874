"""The commands that ask a worker about itself: status, drain, inspect --connect."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
from raw_client import DEADLINE_S, wait_until

from miro_client import Client
from miro_client.cli import main
from miro_cy import Engine
from miro_worker import Worker

MODEL = Path(__file__).parents[1] / "data" / "golden" / "gguf" / "Q4_1.gguf"


@pytest.fixture
def worker() -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="miro-") as folder, Engine.load(MODEL, threads=1) as engine:
        worker = Worker(engine, f"ipc://{folder}/w.sock").start()
        yield worker
        worker.stop(0)


@pytest.fixture
def ask(runner: CliRunner, worker: Worker) -> Callable[..., Result]:
    with Client(worker.endpoint) as client:
        wait_until(lambda: client.health().ready, "the worker is ready")

    def invoke(*arguments: str) -> Result:
        return runner.invoke(main, [*arguments, "--connect", worker.endpoint])

    return invoke


def lines(result: Result, width: int) -> dict[str, str]:
    return {line[:width].strip(): line[width:] for line in result.stdout.splitlines()}


def test_status_of_a_worker_that_is_well(ask: Callable[..., Result], worker: Worker) -> None:
    with Client(worker.endpoint) as client:
        client.complete(tokens=[1, 2, 3], max_tokens=4, ignore_eos=True)
    result = ask("status")
    assert (result.exit_code, result.stderr) == (0, "")
    told = lines(result, 12)
    assert told["status"].startswith("ok, up ")
    assert told["requests"] == "1: 1 length"
    assert told["tokens"].startswith("3 of prompts (0 cached), 4 generated, ")
    assert told["KV blocks"].startswith("0 of ")
    assert told["model"] == "Q4_1, context 512 tokens"


def test_status_as_json(ask: Callable[..., Result]) -> None:
    found = json.loads(ask("status", "--json").stdout)
    assert found["health"]["status"] == "ok"
    assert found["health"]["ready"] is True
    assert found["stats"]["refused"] == {}
    assert found["models"][0]["vocab_size"] > 0


def test_status_of_a_worker_that_drains(ask: Callable[..., Result], worker: Worker) -> None:
    with Client(worker.endpoint, timeout=DEADLINE_S) as client:
        stream = client.generate(tokens=[1, 2, 3], max_tokens=500, ignore_eos=True)
        next(stream)
        result = ask("drain", "--grace-ms", "60000")
        assert (result.exit_code, result.stdout) == (0, "draining: 1 request may still finish\n")
        result = ask("status")
        # It may be through already; a worker that is gone is no more ready than one that drains.
        assert result.exit_code == 1
        assert "draining" in result.output or "no worker" in result.output
        stream.close()
    assert worker.join(DEADLINE_S)


def test_drain_as_json(ask: Callable[..., Result], worker: Worker) -> None:
    assert json.loads(ask("drain", "--json").stdout) == {"live": 0}
    assert worker.join(DEADLINE_S)


@pytest.mark.parametrize("command", ["status", "drain", "inspect"])
def test_no_worker(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("miro_client.connection.CONNECT_S", 0.3)
    result = runner.invoke(main, [command, "--connect", f"ipc://{tmp_path}/none.sock"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("miro: error: no worker answers at ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["status", "drain", "inspect"])
def test_wrong_usage(runner: CliRunner, command: str) -> None:
    result = runner.invoke(main, [command, "--connect", "here"])
    assert result.exit_code == 2
    assert "--connect takes an endpoint" in result.stderr
    assert runner.invoke(main, [command, "--nothing"]).exit_code == 2
    assert "Example" in runner.invoke(main, [command, "--help"]).stdout


def test_inspect_of_what_a_worker_serves(ask: Callable[..., Result]) -> None:
    told = lines(ask("inspect"), 18)
    assert told["context"] == "512 tokens"
    assert told["architecture"].startswith("llama, ")
    (model,) = json.loads(ask("inspect", "--json").stdout)["models"]
    assert model["context"] == 512


def test_inspect_takes_a_model_or_a_worker(runner: CliRunner) -> None:
    for arguments in ([], ["smollm2", "--connect", "default"], ["--connect", "default", "--context", "5"]):
        assert runner.invoke(main, ["inspect", *arguments]).exit_code == 2
