"""A miro-worker in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Between two looks at what a process that starts has written.
POLL_S = 0.05
#: After a request to stop.
STOP_S = 30
#: Of what a process wrote that did not start, what is shown.
TAIL_LINES = 5
TAIL_CHARS = 1000


@contextmanager
def worker(
    model: str, *, context: int, threads: int | None = None, step_ms: float | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, ready, and its endpoint. None leaves a setting to the worker. SystemExit, with the end of what it
    wrote, when it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="miro-") as folder:
        endpoint, log = f"ipc://{folder}/m.sock", Path(folder, "stderr")
        command = [sys.executable, "-m", "miro_worker", "--model", model, "--bind", endpoint]
        command += ["--max-context", str(context)]
        for flag, value in (("--threads", threads), ("--step-ms", step_ms)):
            command += [flag, str(value)] if value else []
        # A file, not a pipe: nobody reads what it writes later, and a full pipe would stop it.
        with log.open("wb") as out, subprocess.Popen(command, stderr=out) as process:
            try:
                _wait(process, log)
                yield process, endpoint
            finally:
                process.terminate()
                process.wait(STOP_S)


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when it has said that it is ready."""
    while True:
        ended = process.poll() is not None
        if any(line.startswith(b"ready ") for line in log.read_bytes().splitlines()):
            return
        if ended:
            raise SystemExit(f"the worker did not start: {tail(log)}")
        time.sleep(POLL_S)


def tail(log: Path) -> str:
    """The last lines of what a process wrote."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-TAIL_LINES:]
    return "\n".join(lines)[-TAIL_CHARS:] or "it said nothing"
