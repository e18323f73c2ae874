"""Claim: the compiled Cython loops reach 95 % of the speed of C written by hand with intrinsics.

Two works, for AVX2 and, where the processor has it, AVX-512: dot products of 128 floats (48 rows, in the L1 cache), and
the float16 matmul kernel with 8 rows of activations, W of 2048 inputs, for 5632 outputs (TinyLlama's shape, 22 MiB) and
for 256 (1 MiB, in the L2 cache). The hand-written matmul reads the same packed weights, once with the kernel's tile and
once with another. Cython and C (loops.pyx, intrinsics.h) are compiled here with the compiler and flags of the kernels,
and must give the same bits before they are timed.

One thread, CPU time of that thread, so that a busy machine disturbs little. Contenders take turns, A B A B; a figure is
the median of the rounds' ratios, with the quartiles beside it. 100 % is as fast as by hand, more is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels import select
from miro_cy._kernels.weights import PackedWeights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOT_ROWS = 48
INPUTS = 2048
OUTPUTS = (5632, 256)
ROWS = 8
SAMPLE_S = 0.03  # CPU time of a sample, about
RNG = np.random.default_rng(0)


def imported(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(level: str, folder: Path) -> ModuleType:
    """loops.pyx for one level, with the flags and directives that setup.py has for the kernels."""
    build = imported("miro_setup", ROOT / "setup.py")
    name = f"loops_{level}"
    source, code = folder / f"{name}.pyx", folder / f"{name}.c"
    library = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    source.write_text((HERE / "loops.pyx").read_text())
    directives = [part for key, value in build.DIRECTIVES.items() for part in ("-X", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "cython", *directives, "-I", ROOT, source, "-o", code], check=True)
    flags = [*build.FLAGS, *(build.GCC_ONLY if build.accepts(build.GCC_ONLY) else []), *build.LEVELS[level]]
    flags += [f"-I{HERE}", f"-I{ROOT / 'miro_cy/_kernels/include'}", f"-I{sysconfig.get_path('include')}"]
    flags += [*shlex.split(sysconfig.get_config_var("CCSHARED") or ""), "-DNDEBUG"]
    subprocess.run([build.compiler(), *flags, "-shared", str(code), "-o", str(library), "-lm"], check=True)
    return imported(name, library)


def aligned(*shape: int) -> NDArray[np.float32]:
    """An array of NaN that begins a cache line: loads that lie across two take twice as long, by hand or not."""
    room = np.empty(math.prod(shape) + 16, np.float32)
    first = -room.ctypes.data % 64 // 4
    array = room[first : first + math.prod(shape)].reshape(shape)
    array[:] = np.nan
    return array


def normal(*shape: int) -> NDArray[np.float32]:
    array = aligned(*shape)
    RNG.standard_normal(shape, np.float32, out=array)
    return array


def race(ours: Callable[[int], float], theirs: Callable[[int], float], rounds: int) -> dict[str, Any]:
    """Rounds of ours, theirs; each gives the CPU seconds of so many repeats."""
    repeats = max(1, int(SAMPLE_S * 20 / max(theirs(20), 1e-6)))
    ours(repeats), theirs(repeats)
    pairs = [(ours(repeats) / repeats, theirs(repeats) / repeats) for _ in range(rounds)]
    shares = [b / a for a, b in pairs]
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        "seconds": statistics.median(a for a, _ in pairs),
        "by_hand_seconds": statistics.median(b for _, b in pairs),
        "share_of_by_hand": middle,
        "quartiles": [low, high],
    }


def same_bits(results: dict[str, Any], what: str) -> None:
    first, *others = results.values()
    if not all(np.array_equal(first.view(np.uint32), other.view(np.uint32)) for other in others):
        raise SystemExit(f"{what}: {', '.join(results)} give different bits")


def dot_products(loops: ModuleType, rounds: int) -> list[dict[str, Any]]:
    q, k = normal(128), normal(DOT_ROWS, 128)
    results = {which: aligned(DOT_ROWS) for which in ("intrinsics", "lanes", "vectors", "folded")}
    for which, y in results.items():
        loops.dots(which, q, k, y, 1)
    same_bits(results, "dot products")
    np.testing.assert_allclose(results["lanes"], k.astype(float) @ q, atol=1e-4)
    y = results["lanes"]

    def timed(which: str) -> Callable[[int], float]:
        return lambda repeats: float(loops.dots(which, q, k, y, repeats))

    names = {"lanes": "plain loops over lanes", "vectors": "vector types", "folded": "vector types, vec.h's mi_fold16"}
    return [
        {"work": "dot of 128", "cython": name, "by_hand": "intrinsics"}
        | {"operations": 2 * 128 * DOT_ROWS}
        | race(timed(which), timed("intrinsics"), rounds)
        for which, name in names.items()
    ]


def matmuls(loops: ModuleType, outputs: int, rounds: int) -> list[dict[str, Any]]:
    plain = (RNG.standard_normal((outputs, INPUTS), np.float32) / 32).astype(np.float16)
    w = PackedWeights(plain.view(np.uint8).ravel(), "F16", outputs, INPUTS)
    x = normal(ROWS, INPUTS)
    results = {which: aligned(ROWS, outputs) for which in ("kernel", "same_tile", "other_tile")}
    for which, y in results.items():
        loops.matmul(which, w, x, y, 1)
    same_bits(results, f"matmul of {outputs} outputs")
    np.testing.assert_allclose(results["kernel"], x.astype(float) @ plain.T.astype(float), atol=1e-3)
    y = results["kernel"]

    def timed(which: str) -> Callable[[int], float]:
        return lambda repeats: float(loops.matmul(which, w, x, y, repeats))

    return [
        {"work": f"matmul {ROWS} x {INPUTS} x {outputs}, float16", "cython": "kernel", "by_hand": name}
        | {"operations": 2 * ROWS * INPUTS * outputs}
        | race(timed("kernel"), timed(which), rounds)
        for which, name in {"same_tile": "same tile", "other_tile": "another tile"}.items()
    ]


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'level':9}{'work':34}{'Cython':30}{'by hand':14}{'GFLOP/s':>9}{'by hand':>9}{'share':>8}  quartiles"]
    for r in results:
        rates = [f"{r['operations'] / r[key] / 1e9:.1f}" for key in ("seconds", "by_hand_seconds")]
        low, high = (f"{100 * q:.1f}" for q in r["quartiles"])
        share = f"{100 * r['share_of_by_hand']:.1f} %"
        names = f"{r['level']:9}{r['work']:34}{r['cython']:30}{r['by_hand']:14}"
        lines.append(f"{names}{rates[0]:>9}{rates[1]:>9}{share:>8}  {low} to {high}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    available = select.available()
    levels = [level for level in ("v4_vnni", "v4") if level in available][:1] + [v for v in ["v3"] if v in available]
    if not levels:
        raise SystemExit("this needs a processor with AVX2")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            loops = compiled(level, Path(folder))
            select.use(level)
            found = dot_products(loops, options.rounds)
            for outputs in OUTPUTS:
                found += matmuls(loops, outputs, options.rounds)
            results += [{"level": level} | result for result in found]
    print(json.dumps(results, indent=1) if options.json else table(results))


if __name__ == "__main__":
    main()
