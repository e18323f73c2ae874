"""Tokens a second of whole steps: prompts, and decoding by number of rows. Runs on a machine that does nothing else."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from miro_cy._kernels.select import active_isa
from miro_cy.batch import BatchView
from miro_cy.hub import resolve
from miro_cy.machine import default_threads
from miro_cy.model.executor import CpuExecutor
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.weights import load_weights

BLOCK = 32
CONTEXT = 1024


class StepBench:
    """An executor with a pool for `rows` sequences, and timed steps over it."""

    def __init__(self, path: Path, threads: int, rows: int, *, exact: bool = False) -> None:
        with open_checkpoint(path) as checkpoint:
            self.spec = checkpoint.spec
            weights = load_weights(checkpoint, threads=threads)
        width = CONTEXT // BLOCK
        self.tables = np.arange(rows * width, dtype=np.int32).reshape(1, rows, width)
        self.executor = CpuExecutor(
            self.spec,
            weights,
            n_blocks=rows * width,
            block_size=BLOCK,
            kv_dtype="fp32" if exact else "fp16",
            fast=weights.quantised and not exact,
            threads=threads,
            max_tokens=CONTEXT,
            context=CONTEXT,
            touch=True,
        )
        self.rng = np.random.default_rng(0)

    def step_seconds(self, rows: int, tokens: int, first: int) -> float:
        """Seconds of one step of `rows` rows of `tokens` tokens each, from position `first`."""
        view = BatchView(rows, CONTEXT, self.tables)
        for row in range(rows):
            view.add_row(row, first, self.rng.integers(0, self.spec.vocab_size, tokens).astype(np.int32), 1)
        began = time.perf_counter()
        self.executor.forward(view)
        return time.perf_counter() - began

    def tokens_per_second(self, rows: int, tokens: int, first: int, repeats: int) -> dict[str, float]:
        self.step_seconds(rows, tokens, first)
        seconds = [self.step_seconds(rows, tokens, first) for _ in range(repeats)]
        return {
            "best": rows * tokens / min(seconds),
            "median": rows * tokens / statistics.median(seconds),
            "step_ms": 1000 * statistics.median(seconds),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = StepBench(resolve(options.model), options.threads, max([*options.rows, 1]), exact=options.exact)
    results = {}
    for rows in options.rows:
        results[f"decode {rows} rows"] = bench.tokens_per_second(rows, 1, 64, 2 * options.repeats)
    for tokens in options.prompts:
        results[f"prompt of {tokens}"] = bench.tokens_per_second(1, tokens, 0, max(3, options.repeats // 3))
    if options.json:
        json.dump({"isa": active_isa(), "threads": options.threads, "results": results}, sys.stdout, indent=1)
        return
    print(f"{options.model}: {active_isa()}, {options.threads} threads")
    for name, f in results.items():
        print(f"{name:>16}  {f['median']:8.1f} tok/s median  {f['best']:8.1f} best  {f['step_ms']:8.2f} ms")


if __name__ == "__main__":
    main()
