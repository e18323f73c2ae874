"""Long runs: fuzzing, soaking, many random rounds. `make check-long` runs them, nothing else does.

Everything in this folder is marked `long`. Seeds are fixed; MIRO_LONG_SCALE multiplies how much is tried (0.05 for a
quick look, 10 for a night), MIRO_SOAK_SECONDS is the length of the soak.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
sys.path[:0] = [str(FOLDER), str(TESTS / "worker")]
SCALE = float(os.environ.get("MIRO_LONG_SCALE", "1"))
#: Of one test, and in it of what takes longest.
TIMEOUT_S, WORK_S = 600 * max(1.0, SCALE), 480 * max(1.0, SCALE)
START_S = 60.0
STOP_S = 30.0

#: A tiny llama with a byte-level tokenizer and a chat template.
text_model = runpy.run_path(str(TESTS / "engine" / "conftest.py"))["text_model"]
#: Hugging Face folders to damage, and what is in them.
_LOADERS = runpy.run_path(str(FOLDER / "loaders.py"))
hostile_folders, model_bytes, tokenizer_json = map(_LOADERS.get, ("hostile_folders", "model_bytes", "tokenizer_json"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if FOLDER in item.path.parents]
    for item in mine:
        item.add_marker("long")
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    # Any `-m` replaces the one in pyproject.toml: without this, `-m model` would start the soak.
    if "long" not in config.option.markexpr:
        items[:] = [item for item in items if item not in mine]
        config.hook.pytest_deselected(items=mine)


@pytest.fixture(scope="session")
def scaled() -> Callable[[int], int]:
    """A number of trials, times MIRO_LONG_SCALE; at least 1."""
    return lambda count: max(1, round(count * SCALE))


@pytest.fixture(scope="session")
def patience() -> float:
    """Seconds that all trials of a test may take together."""
    return WORK_S


@pytest.fixture(scope="session")
def golden_models() -> list[Path]:
    """Every golden model in the repository, as a GGUF file."""
    return sorted((TESTS / "data" / "golden").rglob("*.gguf"))


class Service:
    """A worker in a process of its own, so that a crash is seen as one and what it holds can be counted."""

    def __init__(self, folder: Path, model: Path, engine: dict[str, Any], worker: dict[str, Any]) -> None:
        self.endpoint = f"ipc://{folder}/miro.sock"
        self.log = folder / "log"
        command = [sys.executable, str(FOLDER / "serve.py"), str(model), self.endpoint]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, json.dumps(engine), json.dumps(worker)], stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._line(START_S)

    def alive(self) -> bool:
        return self.process.poll() is None

    def errors(self) -> str:
        """What it logged: warnings and worse."""
        return self.log.read_text(errors="replace")

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident(self) -> int:
        """Bytes of memory in use."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> dict[str, Any]:
        """End it as an operator does; returns the engine's last stats. It must leave cleanly and with a whole pool."""
        self.process.terminate()
        stats: dict[str, Any] = json.loads(self._line(STOP_S))
        assert self.process.wait(STOP_S) == 0, self.errors()
        assert stats["running"] == stats["waiting"] == 0
        assert stats["free_blocks"] + stats["cached_blocks"] == stats["total_blocks"]
        return stats

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _line(self, seconds: float) -> str:
        """The next line it prints, before the deadline."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"nothing within {seconds} s: {self.errors()}"
        return line


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Start a worker over a model: serve(path, engine={...settings}, worker={...limits})."""
    started: list[Service] = []
    folders: list[Path] = []

    def start(model: Path, *, engine: dict[str, Any], worker: dict[str, Any]) -> Service:
        folders.append(Path(tempfile.mkdtemp(prefix="miro-")))  # short: the names of Unix sockets are limited
        started.append(Service(folders[-1], model, engine, worker))
        return started[-1]

    yield start
    for service in started:
        service.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., None]:
    """wait_for(condition, what): until it holds, for half a minute at most."""

    def wait(condition: Callable[[], Any], what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, what()
            time.sleep(0.05)

    return wait
