"""What a comparison prints and saves: figures with the machine and the builds they belong to, and no path."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import miro_cy
from miro_cy._kernels.select import TILES, active_isa
from miro_cy.inspect import inspect_model
from miro_cy.native import build_mode
from miro_cy.tools.report import this_machine
from peers.measure import Row
from peers.works import Named, System

FORMAT = "miro-compare"
VERSION = 1
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
_FLAGS = "import json, setup; print(json.dumps({e.name: e.extra_compile_args for e in setup.extensions()}))"


def result_of(
    rows: Sequence[Row], second: System, path: Path, *, threads: int, rounds: int, arithmetic: tuple[str, str, str]
) -> dict[str, Any]:
    """All that is known of a comparison, as JSON takes it. arithmetic: miro's compute mode, kernels and KV dtype."""
    return {
        "format": FORMAT,
        "format_version": VERSION,
        **about_run(path, threads, second, arithmetic=arithmetic),
        "rounds": rounds,
        "rows": [_row(row, second.name) for row in rows],
    }


def about_run(
    path: Path, threads: int, *others: Named, arithmetic: tuple[str, str, str] | None = None
) -> dict[str, Any]:
    """What figures belong to: the day, the machine, the model, the builds of miro and of what it is compared with.

    arithmetic: compute mode, kernels and KV dtype of the engine that ran (default: as with default settings).
    """
    about = inspect_model(path)
    default = (about.compute, TILES if about.compute == "bf16" else active_isa(), about.kv_dtype)
    compute, isa, kv_dtype = arithmetic or default
    machine = this_machine(isa, threads)
    return {
        "date": date.today().isoformat(),
        "machine": {
            "cpu": machine.cpu,
            "cpus": machine.cpus,
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "kernel": platform.release(),
        },
        "model": {
            "name": about.name,
            "format": about.format,
            "file_bytes": about.bytes,
            "compute": compute,
            "kv_dtype": kv_dtype,
        },
        "miro": {
            "version": miro_cy.__version__,
            **commit_of(ROOT),
            "build": build_mode(),
            "isa": machine.isa,
            "flags": compile_flags(machine.isa),
        },
        **{other.name: other.version() for other in others},
        "threads": threads,
    }


def _row(row: Row, second: str) -> dict[str, Any]:
    return {
        "work": row.work,
        "unit": row.unit,
        "miro": asdict(row.first),
        second: asdict(row.second),
        "ratio": None if row.ratio is None else asdict(row.ratio),
        "ratios": row.ratios,
    }


def lines_of(result: dict[str, Any], second: str) -> Iterator[str]:
    """The same for a person to read."""
    about = (
        f"{result['model']['compute']}, {result['miro']['isa']}, {result['threads']} threads, {result['rounds']} rounds"
    )
    peer = " ".join(str(value) for value in result[second].values())
    yield f"{result['model']['name']}: {about}; {second} {peer}"
    yield "median (least to most) of the rounds; ratio: how many times as fast miro is"
    for row in result["rows"]:
        digits = {"tok/s": 1, "s": 3, "ms": 4}[row["unit"]]
        figures = "".join(f"  {name} {row[name]['median']:>9,.{digits}f}" for name in ("miro", second))
        ratio = row["ratio"]
        spread = "none" if ratio is None else f"{ratio['median']:5.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        yield f"{row['work']:>30} {row['unit']:>6}{figures}  ratio {spread}"


def commit_of(root: Path) -> dict[str, Any]:
    """commit: of the repository, None outside of one. changed: tracked files differ from it."""
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if commit is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def compile_flags(isa: str) -> dict[str, list[str]] | None:
    """The compiler's flags for the kernels of that instruction set, and for the rest, as setup.py gives them to the
    compiler that is here now; None without setuptools, which it needs.
    """
    # In a process of its own: setuptools changes the one that imports it.
    command = [sys.executable, "-c", _FLAGS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    flags: dict[str, list[str]] = json.loads(done.stdout)
    return {"kernels": flags[f"miro_cy._kernels.isa.{isa}"], "rest": flags["miro_cy.model.executor"]}


def save(result: dict[str, Any], folder: Path = RESULTS, *, kind: str = "") -> Path:
    """Write a result to <date>-<kind>-<model>-<cpu>.json, or with a number behind where that exists. Returns the file.

    kind: of result, none for a comparison of steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = (result["date"], kind, slug(result["model"]["name"]), slug(result["machine"]["cpu"]))
    name = "-".join(filter(None, parts))
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
                file.write("\n")
            return path
        except FileExistsError:
            number += 1


def slug(text: str) -> str:
    """Lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "unknown"
