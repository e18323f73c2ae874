"""llama.cpp from the xllamacpp wheel (extra [peers]): its HTTP server in this process, asked for whole requests.

Run as a program with a JSON object as its argument, it loads a model and prints the seconds that took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from peers.works import NEW, SHORT, PeerError

#: Of one request, or one load.
DEADLINE_S = 600


def start_server(task: dict[str, Any]) -> Any:
    """A server that is ready. task: path, context (tokens of a slot), slots, threads."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task["path"]
    params.n_ctx = task["context"] * task["slots"]
    params.n_parallel = task["slots"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task["threads"]
    return xllamacpp.Server(params)


class Wheel:
    name = "llama.cpp"

    def __init__(self, path: Path, *, context: int, slots: int, threads: int, vocab_size: int) -> None:
        """Raises PeerError when xllamacpp is not installed."""
        self._task = {"path": str(path), "context": context, "slots": slots, "threads": threads}
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        try:
            self._server = start_server(self._task)
        except ImportError as error:
            raise PeerError("xllamacpp is not installed: pip install 'miro-cy[peers]', or use --native") from error
        self._url = f"{self._server.listening_address}/completion"

    def version(self) -> dict[str, str | int]:
        return {"kind": "xllamacpp", "version": version("xllamacpp")}

    def prompt(self, length: int) -> float:
        return float(self._ask(self._draw(length), 1)["prompt_per_second"])

    def decode(self, requests: int) -> float:
        prompts = [self._draw(SHORT) for _ in range(requests)]
        with ThreadPoolExecutor(requests) as threads:
            timings = list(threads.map(lambda ids: self._ask(ids, NEW), prompts))
        return 1000 * (NEW - 1) * requests / max(t["predicted_ms"] for t in timings)

    def depths(self, depths: Sequence[int]) -> list[float]:
        return [self._ask(self._draw(depth), NEW)["predicted_ms"] / 1000 / (NEW - 1) for depth in depths]

    def load(self) -> float:
        """Imports being done; one slot, for miro is loaded with room for one context too."""
        command = [sys.executable, "-m", "peers.wheel", json.dumps({**self._task, "slots": 1})]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
            )
            return float(done.stdout.split()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            raise PeerError(f"llama.cpp did not load the model: {error!s:.200}") from error

    def _draw(self, length: int) -> list[int]:
        """A random prompt."""
        ids: list[int] = self._rng.integers(0, self._vocab_size, length).tolist()
        return ids

    def _ask(self, ids: list[int], n: int) -> dict[str, Any]:
        """The server's timings of one request for n tokens."""
        body = {"prompt": ids, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
                timings: dict[str, Any] = json.load(reply)["timings"]
        except (OSError, ValueError, KeyError) as error:
            raise PeerError(f"llama.cpp's server failed: {error!s:.200}") from error
        return timings


def _main() -> None:
    import xllamacpp  # noqa: F401  (not part of what is timed)

    task = json.loads(sys.argv[1])
    began = time.perf_counter()
    _server = start_server(task)
    print(time.perf_counter() - began, flush=True)
    os._exit(0)  # it would wait for its server, which waits for requests


if __name__ == "__main__":
    _main()
