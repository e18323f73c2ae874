"""llama.cpp's own programs, llama-bench and llama-batched-bench, run once for each repetition.

They load the model each time, which their figures leave out.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peers.works import NEW, SHORT, PeerError

BENCH, BATCHED = "llama-bench", "llama-batched-bench"
#: Of one run.
DEADLINE_S = 3600
#: llama.cpp rounds the context of a sequence to this many tokens.
CONTEXT_UNIT = 256

#: run(command) -> what it wrote to standard output
Run = Callable[[list[str]], str]


def run_program(command: list[str]) -> str:
    """Raises PeerError when the program is missing or fails."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
        )  # fmt: skip
    except OSError as error:
        raise PeerError(f"cannot run {name}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{name} ran for more than {DEADLINE_S} s") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise PeerError(f"{name} ended with status {done.returncode}: {words[-1]:.200}")
    return done.stdout.decode(errors="replace")


class Native:
    name = "llama.cpp"

    def __init__(self, folder: Path, model: Path, threads: int, run: Run = run_program) -> None:
        """folder: holds the programs. Raises PeerError when one is missing."""
        for program in (BENCH, BATCHED):
            if not (folder / program).is_file():
                raise PeerError(f"{str(folder)!r:.200} has no {program}")
        self._folder = folder
        self._common = ["-m", str(model), "-t", str(threads)]
        self._run = run
        self._version: dict[str, str | int] = {}

    def version(self) -> dict[str, str | int]:
        if not self._version:  # nothing but batched decoding was measured, which does not tell
            self._bench(0, 1, [0])
        return {"kind": "native", **self._version}

    def prompt(self, length: int) -> float:
        return self._bench(length, 0, [0])[0]

    def decode(self, requests: int) -> float:
        context = requests * -(-(SHORT + NEW) // CONTEXT_UNIT) * CONTEXT_UNIT
        command = [str(self._folder / BATCHED), *self._common, "-tb", self._common[-1], "-c", str(context)]
        command += ["-npp", str(SHORT), "-ntg", str(NEW), "-npl", str(requests), "--output-format", "jsonl"]
        return parse_batched(self._run(command), requests)

    def depths(self, depths: Sequence[int]) -> list[float]:
        return [1 / speed for speed in self._bench(0, NEW, depths)]

    def load(self) -> float:
        """A whole process, from its start to its end after a first token."""
        began = time.perf_counter()
        self._bench(0, 1, [0], "--no-warmup")
        return time.perf_counter() - began

    def _bench(self, n_prompt: int, n_gen: int, depths: Sequence[int], *more: str) -> list[float]:
        """Tokens a second at each depth."""
        command = [str(self._folder / BENCH), *self._common, "-p", str(n_prompt), "-n", str(n_gen)]
        command += ["-d", ",".join(map(str, depths)), "-r", "1", "-o", "json", *more]
        tests = parse_bench(self._run(command))
        self._version = build_of(tests[0])
        return [speed_of(tests, n_prompt, n_gen, depth) for depth in depths]


def parse_bench(text: str) -> list[dict[str, Any]]:
    """The tests that llama-bench reports with `-o json`. Raises PeerError for anything else."""
    try:
        tests = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"{BENCH} did not print JSON: {text.strip()!r:.100}") from error
    if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
        raise PeerError(f"{BENCH} did not print a list of tests: {text.strip()!r:.100}")
    return tests


def speed_of(tests: Sequence[dict[str, Any]], n_prompt: int, n_gen: int, depth: int) -> float:
    """Tokens a second of that test. Raises PeerError when it is missing, there twice, or has no speed."""
    wanted = {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": depth}
    found = [test for test in tests if wanted.items() <= test.items()]
    if len(found) != 1:
        raise PeerError(f"{BENCH} reports {len(found)} tests of {wanted}")
    return _speed(found[0].get("avg_ts"), BENCH)


def build_of(test: dict[str, Any]) -> dict[str, str | int]:
    """What llama-bench says of its own build."""
    number, commit = test.get("build_number"), test.get("build_commit")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(commit, str) or len(commit) > 100:
        raise PeerError(f"{BENCH} does not say which build it is")
    return {"build_number": number, "build_commit": commit}


def parse_batched(text: str, requests: int) -> float:
    """Tokens a second of all requests together, in what llama-batched-bench prints: objects among other lines.

    Raises PeerError when there is not one result for that many requests, or it has no speed.
    """
    wanted = {"pp": SHORT, "tg": NEW, "pl": requests}
    found = [row for row in _objects(text) if wanted.items() <= row.items()]
    if len(found) != 1:
        raise PeerError(f"{BATCHED} reports {len(found)} results of {wanted}")
    return _speed(found[0].get("speed_tg"), BATCHED)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PeerError(f"{BATCHED} printed half a result: {line!r:.100}") from error
            yield row


def _speed(value: Any, program: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise PeerError(f"{program} reports no speed but {value!r:.60}")
    return float(value)
