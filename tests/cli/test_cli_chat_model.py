"""`miro chat` with a tiny model that has a tokenizer and a chat template, and with workers that come and go."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from terminal import CTRL_C, CTRL_D, DEADLINE_S, PROMPT, SOURCES, Terminal, chat_code

from miro_client.cli import main
from miro_cy import Engine
from miro_worker import Worker, WorkerConfig

TESTS = Path(__file__).parents[1]
text_model = runpy.run_path(str(TESTS / "engine" / "conftest.py"))["text_model"]
sys.path.insert(0, str(TESTS / "worker"))
from fake_engine import FakeEngine  # noqa: E402
from raw_client import wait_until  # noqa: E402

pytestmark = pytest.mark.timeout(120)
GREEDY = ("--json", "--max-tokens", "5", "--temperature", "0")


@pytest.fixture
def endpoint() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="miro-")  # a short path: the names of Unix sockets are limited
    yield f"ipc://{folder}/c.sock"
    shutil.rmtree(folder, ignore_errors=True)


def chat(runner: CliRunner, lines: str, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    result = runner.invoke(main, ["chat", *arguments], input=lines)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def test_the_conversation_reaches_the_model(runner: CliRunner, text_model: Path, endpoint: str) -> None:
    lines = "he\nher\n/clear\nhe\n"
    code, answers, errors = chat(runner, lines, "--model", str(text_model), "--threads", "1", *GREEDY)
    assert (code, errors) == (0, "")
    with Engine.load(text_model, threads=1) as engine:
        history: list[dict[str, str]] = []
        for question, answer in zip(("he", "her"), answers, strict=False):
            history.append({"role": "user", "content": question})
            prompt = engine.tokenizer.encode(engine.tokenizer.render(history), add_special=False)
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            history.append({"role": "assistant", "content": answer["text"]})
        assert answers[1]["usage"]["prompt_tokens"] > answers[0]["usage"]["prompt_tokens"]
        assert (answers[2]["tokens"], answers[2]["usage"]) == (answers[0]["tokens"], answers[0]["usage"])
        with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)):
            code, through_worker, errors = chat(runner, lines, "--connect", endpoint, *GREEDY)
    assert (code, errors) == (0, "")
    assert [a["tokens"] for a in through_worker] == [a["tokens"] for a in answers]


def test_a_question_too_long_for_the_context_is_dropped(runner: CliRunner, text_model: Path) -> None:
    lines = f"he\n{'x' * 300}\nher\n"
    code, answers, errors = chat(runner, lines, "--model", str(text_model), "--threads", "1", *GREEDY)
    assert code == 1
    assert answers[1]["type"] == "ContextOverflow"
    assert "the question is dropped; /clear and /undo make room" in errors
    assert 0 < answers[2]["usage"]["prompt_tokens"] - answers[0]["usage"]["prompt_tokens"] < 50


def test_a_worker_that_is_killed_ends_a_piped_chat(endpoint: str) -> None:
    program = [sys.executable, str(TESTS / "worker" / "fake_engine.py"), endpoint]
    code = f"import sys; sys.path[:0] = {SOURCES!r}\n" + chat_code("--connect", endpoint, "--max-tokens", "3")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout
            assert worker.stdout.readline() == "ready\n"
            with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
                assert process.stdin
                assert process.stdout
                process.stdin.write("one\n")
                process.stdin.flush()
                assert len(process.stdout.readline().split()) == 3
                worker.kill()
                worker.wait(DEADLINE_S)
                out, err = process.communicate("two\nthree\n", timeout=DEADLINE_S)
        finally:
            worker.kill()
    assert (process.returncode, out) == (1, "")
    assert err.startswith(("miro: error: the worker closed", "miro: error: no worker answers at"))
    assert err.count("\n") == 1


def test_at_a_terminal_ctrl_c_cancels_at_the_worker_and_a_new_worker_is_found(endpoint: str) -> None:
    engine = FakeEngine(step_seconds=0.002)
    terminal = Terminal(chat_code("--connect", endpoint, "--max-tokens", "3000"))
    try:
        with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)):
            terminal.expect(PROMPT)
            terminal.type("one\r")
            terminal.expect("one\r\n")
            terminal.expect(" ")  # the first token
            terminal.type(CTRL_C)
            terminal.expect("[stopped]")
            wait_until(lambda: not engine.has_work, "the worker has stopped")
            terminal.expect(PROMPT)
            terminal.type("two\r")
            wait_until(lambda: engine.has_work, "the next answer has begun")
        terminal.expect("miro: error: ")
        terminal.expect(PROMPT)
        assert [len(prompt["messages"]) for prompt in engine.prepared] == [1, 3]
        with Worker(engine, endpoint, config=WorkerConfig(grace_ms=0)):
            terminal.type("three\r")
            wait_until(lambda: len(engine.prepared) == 3, "the new worker is asked")
            terminal.type(CTRL_C)
            terminal.expect("[stopped")
            terminal.expect(PROMPT)
        assert [m["content"] for m in engine.prepared[2]["messages"] if m["role"] == "user"] == ["one", "three"]
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    finally:
        terminal.close()
