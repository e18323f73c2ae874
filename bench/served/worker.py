"""A miro-worker in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

#: After a request to stop.
STOP_S = 30


@contextmanager
def worker(
    model: str, *, context: int, threads: int | None = None, step_ms: float | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, ready, and its endpoint. None leaves a setting to the worker. SystemExit when it does not start."""
    with tempfile.TemporaryDirectory(prefix="miro-") as folder:
        endpoint = f"ipc://{folder}/m.sock"
        command = [sys.executable, "-m", "miro_worker", "--model", model, "--bind", endpoint]
        command += ["--max-context", str(context)]
        for flag, value in (("--threads", threads), ("--step-ms", step_ms)):
            command += [flag, str(value)] if value else []
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                while not (line := process.stderr.readline()).startswith("ready "):
                    if not line:
                        raise SystemExit("the worker did not start")
                yield process, endpoint
            finally:
                process.terminate()
                process.wait(STOP_S)
