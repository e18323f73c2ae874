"""llama.cpp's llama-server, a program that was built for this machine: started, asked over HTTP, stopped."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.works import PeerError
from served.systems import DEADLINE_S, Answer
from served.worker import STOP_S, tail

HOST = "127.0.0.1"
START_S = 120


@contextmanager
def llama_server(program: Path, model: Path, *, slots: int, context: int, threads: int) -> Iterator[Llama]:
    """The server, ready. slots: requests at once; context: tokens of each. Raises PeerError when it does not start."""
    port = _free_port()
    command = [str(program), "-m", str(model), "--host", HOST, "--port", str(port), "--parallel", str(slots)]
    command += ["-c", str(slots * context), "--threads", str(threads), "--threads-batch", str(threads)]
    with tempfile.TemporaryDirectory(prefix="miro-") as folder:
        log = Path(folder, "stderr")
        try:
            with log.open("wb") as out:
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out)
        except OSError as error:
            raise PeerError(f"cannot run {program.name}: {error.strerror}") from error
        try:
            if not _answers(process, port):
                raise PeerError(f"{program.name} did not start: {tail(log)}")
            yield Llama(program, port)
        finally:
            process.terminate()
            process.wait(STOP_S)


class Llama:
    """The server at a port."""

    name = "llama-server"

    def __init__(self, program: Path, port: int) -> None:
        self._program = program
        self._port = port

    def version(self) -> dict[str, str | int]:
        done = subprocess.run([str(self._program), "--version"], capture_output=True, text=True, check=False)
        return {"kind": "native", "version": version_of(done.stderr + done.stdout)}

    def pieces(self, prompt: Sequence[int], new: int, answer: Answer) -> Iterator[int]:
        body = {"prompt": list(prompt), "n_predict": new, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection(HOST, self._port, timeout=DEADLINE_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise PeerError(f"{self.name} answered {reply.status}: {reply.read(200)!r}")
            for message in messages(reply):
                if message.get("stop"):
                    cached = message.get("timings", {}).get("cache_n")
                    answer.cached = cached if isinstance(cached, int) else None
                    return
                if tokens := message.get("tokens"):
                    yield len(tokens)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{self.name} failed: {error!s:.200}") from error
        finally:
            connection.close()


def messages(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects in a stream of server-sent events. Raises PeerError for data that is none."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        try:
            message = json.loads(line[5:])
        except (ValueError, RecursionError) as error:
            raise PeerError(f"llama-server sent {line[:60]!r}") from error
        if not isinstance(message, dict) or "error" in message:
            raise PeerError(f"llama-server sent {line[:200]!r}")
        yield message


def version_of(text: str) -> str:
    """What `llama-server --version` prints of itself."""
    found = re.search(r"^version:\s*(.{1,80})$", text, re.M)
    return found[1].strip() if found else "unknown"


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it does; False when it has ended, or does not in time."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
