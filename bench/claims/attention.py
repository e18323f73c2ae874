"""Claim: tiled attention needs neither the time nor the memory of attention that materialises all scores.

Causal self-attention of one long prompt, float32 throughout, by miro's kernel (online softmax over tiles of 64 keys)
and by NumPy: for each head scores = q k^T of tokens x tokens in one buffer, softmax of the visible part, product with
v. The products are the BLAS's; masking and softmax go by rows of 32, which stay in the cache, on as many Python threads
as the BLAS has. Each run is a process of its own; systems take turns. Seconds are of the attention alone, MiB the
growth of the process's peak (ru_maxrss) while it ran: output and buffers, inputs not counted. Ratios are medians of the
rounds', those of CPU time beside those of time, because a busy machine disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {"SmolLM2-135M": Shape(9, 3, 64), "TinyLlama-1.1B": Shape(32, 4, 64)}
SYSTEMS = ("tiled", "materialised")
STRIP = 32  # rows of scores that are masked and normalised at a time
BLOCK = 32  # tokens a KV block
SAMPLED = 16  # query positions at which the two results are compared


# NumPy is imported in the measured processes alone: what the parent holds counts as a child's peak.


def materialised(q: Any, k: Any, v: Any, threads: int) -> Any:
    """q [tokens, heads, d], k and v [tokens, kv_heads, d], float32 -> [tokens, heads, d]; q is scaled already."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    tokens, heads, _ = q.shape
    scores = np.empty((tokens, tokens), np.float32)
    out = np.empty_like(q)
    total = np.empty((tokens, 1), np.float32)
    triangle = np.triu(np.full((STRIP, STRIP), -np.inf, np.float32), 1)

    def softmax(first: int) -> None:
        last = min(first + STRIP, tokens)
        visible = scores[first:last, :last]
        visible[:, first:] += triangle[: last - first, : last - first]
        visible -= visible.max(axis=1, keepdims=True)
        np.exp(visible, out=visible)
        total[first:last] = visible.sum(axis=1, keepdims=True)
        scores[first:last, last:] = 0

    with ThreadPoolExecutor(threads) as pool:
        for head in range(heads):
            group = head * k.shape[1] // heads
            np.matmul(q[:, head], k[:, group].T, out=scores)
            list(pool.map(softmax, range(0, tokens, STRIP)))
            out[:, head] = (scores @ v[:, group]) / total
    return out


def run_one(system: str, shape: Shape, tokens: int, threads: int) -> dict[str, Any]:
    """One measurement, in this process."""
    import numpy as np

    from miro_cy._kernels import ops
    from miro_cy._kernels.select import active_isa
    from miro_cy.batch import BatchView

    rng = np.random.default_rng(0)
    scale = shape.head_dim**-0.5
    q = rng.standard_normal((tokens, shape.heads, shape.head_dim), np.float32)
    k, v = (rng.standard_normal((tokens, shape.kv_heads, shape.head_dim), np.float32) for _ in range(2))
    blocks = -(-tokens // BLOCK)
    store = ops.KVStore(blocks, shape.kv_heads, shape.head_dim, BLOCK, "fp32")
    view = BatchView(1, tokens, np.arange(blocks, dtype=np.int32).reshape(1, 1, -1))
    view.add_row(0, 0, np.zeros(tokens, np.int32), 1)
    if system == "tiled":
        store.write(view, k, v, threads)
    else:
        q *= scale
    before = peak_bytes()
    start, used = time.perf_counter(), time.process_time()
    out = store.attend(view, q, scale, 0.0, 0, threads) if system == "tiled" else materialised(q, k, v, threads)
    seconds, cpu = time.perf_counter() - start, time.process_time() - used
    return {
        "isa": active_isa(),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "mib": (peak_bytes() - before) / 2**20,
        "sample": out[:: max(1, tokens // SAMPLED)].ravel().tolist(),
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(system: str, name: str, tokens: int, threads: int) -> dict[str, Any]:
    """One measurement, in a process of its own with that many BLAS threads."""
    command = [sys.executable, __file__, "--one", system, "--shapes", name]
    command += ["--tokens", str(tokens), "--threads", str(threads)]
    limits = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(command, env=os.environ | limits, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compare(name: str, tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for _ in range(rounds):
        for system in SYSTEMS:
            runs[system].append(measure(system, name, tokens, threads))
    ratios, cpu_ratios = (
        [b[key] / a[key] for a, b in zip(*runs.values(), strict=True)] for key in ("seconds", "cpu_seconds")
    )
    samples = [runs[system][0]["sample"] for system in SYSTEMS]
    error = max(abs(a - b) for a, b in zip(*samples, strict=True))
    if not error < 1e-4:
        raise SystemExit(f"{name}: results differ by {error}")
    return {
        "shape": {"name": name, **SHAPES[name]._asdict()},
        "tokens": tokens,
        "threads": threads,
        "isa": runs["tiled"][0]["isa"],
        **{
            system: {key: statistics.median(run[key] for run in done) for key in ("seconds", "cpu_seconds", "mib")}
            for system, done in runs.items()
        },
        "output_mib": tokens * SHAPES[name].heads * SHAPES[name].head_dim * 4 / 2**20,
        "times_faster": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "times_less_cpu": statistics.median(cpu_ratios),
        "max_difference": error,
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'':16}{'threads':>8}{'tiled':>20}{'materialised':>20}{'times faster':>22}{'CPU':>7}{'memory':>8}"]
    for r in results:
        cells = [f"{r[s]['seconds']:.2f} s {r[s]['mib']:.0f} MiB" for s in SYSTEMS]
        low, high = r["spread"]
        faster = f"{r['times_faster']:.2f} ({low:.2f} to {high:.2f})"
        less = f"{r['times_less_cpu']:>7.2f}{r['materialised']['mib'] / r['tiled']['mib']:>8.1f}"
        lines.append(f"{r['shape']['name']:16}{r['threads']:>8}{cells[0]:>20}{cells[1]:>20}{faster:>22}{less}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        json.dump(run_one(options.one, SHAPES[options.shapes[0]], options.tokens, options.threads[0]), sys.stdout)
        return
    results = [compare(s, options.tokens, t, options.rounds) for s in options.shapes for t in options.threads]
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"causal attention of {options.tokens} tokens, float32, kernels for {results[0]['isa']}")
    print(table(results))


if __name__ == "__main__":
    main()
