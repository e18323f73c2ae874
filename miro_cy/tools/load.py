"""How long loading a model takes, and the memory it leaves: each time in a process that has loaded nothing before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miro_cy.engine import Engine
from miro_cy.errors import InternalError
from miro_cy.native import live_objects
from miro_cy.sampling.params import SamplingParams

#: The child finds modules where its parent did, and nowhere else: -P keeps the working folder out.
_CHILD = """
import json, sys
task = json.load(sys.stdin)
sys.path[:] = task["path"]
from miro_cy.tools.load import answer
answer(task)
"""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """seconds: of Engine.load, imports being done. process_seconds: of the whole process, from its start to its end.
    memory_bytes: resident after loading, less what was resident after the imports. pool_bytes: of the KV pool, which is
    not in memory_bytes: its memory is taken as it is first used.
    """

    seconds: float
    process_seconds: float
    memory_bytes: int
    pool_bytes: int


def time_load(model: str, settings: Mapping[str, Any], *, first_token: bool = False) -> LoadSample:
    """Load a model once, in a new process. settings: of EngineConfig, as JSON takes them, without kv_memory, which
    would have the pool touched. first_token: the process generates one too before it ends.

    Raises InternalError when the process fails, with its last words.
    """
    path = [os.path.abspath(part) for part in sys.path]
    task = {"path": path, "model": model, "settings": dict(settings), "first_token": first_token}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(json.dumps(task).encode())
        except BaseException:  # an interrupt, say
            process.kill()
            raise
    ended = time.perf_counter()
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
        raise InternalError(f"the process that loads the model failed: {words[-1]:.300}")
    return LoadSample(process_seconds=ended - began, **json.loads(out))


def answer(task: Mapping[str, Any]) -> None:
    """What the process that `time_load` starts does: load, and print fields of a LoadSample as JSON."""
    before = resident_bytes()
    began = time.perf_counter()
    engine = Engine.load(task["model"], **task["settings"])
    seconds = time.perf_counter() - began
    memory = max(1, resident_bytes() - before)  # a tiny model may fit into what was there
    pool = live_objects()["kv_bytes"]
    with engine:
        if task["first_token"]:
            engine.generate({"tokens": [0]}, SamplingParams(temperature=0, max_tokens=1))
    json.dump({"seconds": seconds, "memory_bytes": memory, "pool_bytes": pool}, sys.stdout)


def resident_bytes() -> int:
    """Of this process; VmRSS, which counts files that are mapped too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    raise InternalError("the system does not tell how much memory the process has")
