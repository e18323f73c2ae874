"""The README's examples, run as a reader would: its Python, its command lines, its worker and client."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LIMIT_S = 200
START_S = 120


def block(section: str, language: str, index: int = 0) -> str:
    """A code block of that language under that heading, the first unless told otherwise."""
    body = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```$", body, re.M | re.S)
    assert len(found) > index, f"README.md has no {language} example {index} under {section!r}"
    return found[index]


@pytest.fixture
def environment(smollm2_path: Path) -> Iterator[dict[str, str]]:
    """`miro` on the PATH, the model under its name, and the default socket in a folder of this test."""
    # Not tmp_path: a Unix socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="miro-"))
    try:
        (folder / "bin").mkdir()
        (folder / "cache").mkdir()
        (folder / "cache" / "smollm2.gguf").symlink_to(smollm2_path.resolve())
        command = folder / "bin" / "miro"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m miro_client.cli "$@"\n')
        command.chmod(0o755)
        yield os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "worker", "client")),
            "PYTHONIOENCODING": "utf-8",
            "MIRO_CACHE": str(folder / "cache"),
            "XDG_RUNTIME_DIR": str(folder),
        }
    finally:
        shutil.rmtree(folder)


def run(command: list[str], environment: dict[str, str]) -> str:
    """The command's standard output; it must succeed."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def worker(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The README's worker, ready."""
    log = Path(environment["XDG_RUNTIME_DIR"], "log")
    command = block("As a service", "bash").split()
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + START_S
            while not re.search("^ready ", log.read_text(), re.M):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, f"the worker is not ready: {log.read_text()}"
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def test_make_targets_exist() -> None:
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony
    named = re.findall(r"^make (\w+)", block("Start", "sh"), re.M)
    assert named == ["run", "test"]
    assert set(named) <= set(phony[1].split())


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_python_example(environment: dict[str, str]) -> None:
    out = run([sys.executable, "-c", block("From Python", "python")], environment)
    assert "sky" in out
    assert len(out.splitlines()) >= 4


def test_command_line_example(environment: dict[str, str]) -> None:
    pull, ask, as_json, inspect = block("From the command line", "bash").strip().splitlines()
    assert run(["bash", "-c", pull], environment).strip() == f"{environment['MIRO_CACHE']}/smollm2.gguf"
    assert "sky" in run(["bash", "-c", ask], environment)
    answer = json.loads(run(["bash", "-c", as_json], environment))
    assert set(answer) == {"text", "tokens", "finish_reason", "usage", "timing"}
    assert 0 < len(answer["tokens"]) <= 40
    assert answer["usage"]["completion_tokens"] == len(answer["tokens"])
    assert "at 4,096 tokens" in run(["bash", "-c", inspect], environment)
    chat, piped = block("From the command line", "bash", 1).strip().splitlines()
    assert run(["bash", "-c", chat], environment) == ""  # nothing is asked on an empty standard input
    first, second = map(json.loads, run(["bash", "-c", piped], environment).splitlines())
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + len(first["tokens"])


def test_worker_and_client_example(environment: dict[str, str], worker: subprocess.Popen[bytes]) -> None:
    streamed = run([sys.executable, "-c", block("As a service", "python")], environment)
    assert "sky" in streamed
    assert len(run([sys.executable, "-c", block("As a service", "python", 1)], environment)) > 32
    drawn, found = run([sys.executable, "-c", block("As a service", "python", 2)], environment).splitlines()
    assert len(set(ast.literal_eval(drawn))) == 3
    scores = [score for score, _ in ast.literal_eval(found)]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)
    question = ["Why is the sky blue?", "--max-tokens", "32"]
    connected = run(["miro", "run", "--connect", "default", *question], environment)
    alone = run(["miro", "run", *question], environment)
    assert connected == alone
    assert alone.strip() in streamed
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
