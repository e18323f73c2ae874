"""The engine beside llama.cpp (xllamacpp, extra [peers]), same file, threads and prompts, interleaved A B A B.

Both answer whole requests: miro through Engine.generate, llama.cpp through its own HTTP server in this process. Prompt
speed is that of one 512-token prompt; decode speed is all tokens after the first of each request over the longest time
that a request took for them, for 1 and for 8 requests at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miro_cy import Engine, SamplingParams
from miro_cy._kernels.select import active_isa
from miro_cy.hub import resolve
from miro_cy.machine import default_threads

PROMPT = 512
SHORT = 16
NEW = 64


class System(Protocol):
    def prompt(self, ids: list[int]) -> float:
        """Tokens a second of one prompt."""

    def decode(self, prompts: list[list[int]]) -> float:
        """Tokens a second of decoding all prompts at once, NEW tokens each."""


class Miro:
    def __init__(self, path: Path, threads: int) -> None:
        self.engine = Engine.load(path, threads=threads, max_context=2048, kv_memory="auto")

    def prompt(self, ids: list[int]) -> float:
        done = self.engine.generate({"tokens": ids}, SamplingParams(temperature=0, max_tokens=1))
        return 1000 * len(ids) / done.timing.prefill_ms

    def decode(self, prompts: list[list[int]]) -> float:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        done = self.engine.generate([{"tokens": ids} for ids in prompts], params)
        return 1000 * (NEW - 1) * len(prompts) / max(c.timing.decode_ms for c in done)


class LlamaCpp:
    def __init__(self, path: Path, threads: int, slots: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 2048 * slots
        params.n_parallel = slots
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)
        self.url = f"{self.server.listening_address}/completion"

    def ask(self, ids: list[int], n: int) -> dict[str, Any]:
        body = {"prompt": ids, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            timings: dict[str, Any] = json.load(reply)["timings"]
            return timings

    def prompt(self, ids: list[int]) -> float:
        return float(self.ask(ids, 1)["prompt_per_second"])

    def decode(self, prompts: list[list[int]]) -> float:
        timings: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda ids=ids: timings.append(self.ask(ids, NEW))) for ids in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1000 * (NEW - 1) * len(prompts) / max(t["predicted_ms"] for t in timings)


def measure(systems: dict[str, System], rounds: int, vocab: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(100, vocab, n)]

    works = {
        f"prompt of {PROMPT}": lambda system: system.prompt(ids(PROMPT)),
        "decode, 1 request": lambda system: system.decode([ids(SHORT)]),
        "decode, 8 requests": lambda system: system.decode([ids(SHORT) for _ in range(8)]),
    }
    results: dict[str, Any] = {}
    for work, run in works.items():
        figures: dict[str, list[float]] = {name: [] for name in systems}
        for round_ in range(rounds + 1):
            for name, system in systems.items():
                figure = run(system)
                if round_:  # the first round warms up
                    figures[name].append(figure)
            time.sleep(0.2)
        results[work] = {name: statistics.median(values) for name, values in figures.items()}
        if len(systems) > 1:
            ratios = [a / b for a, b in zip(*figures.values(), strict=True)]
            results[work]["ratio"] = statistics.median(ratios)
            results[work]["spread"] = [min(ratios), max(ratios)]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = resolve(options.model)
    miro = Miro(path, options.threads)
    systems: dict[str, System] = {"miro": miro, "llama.cpp": LlamaCpp(path, options.threads, 8)}
    results = measure(systems, options.rounds, miro.engine.vocab_size)
    if options.json:
        json.dump({"isa": active_isa(), "threads": options.threads, "tok/s": results}, sys.stdout, indent=1)
        return
    print(f"{path.name}: {active_isa()}, {options.threads} threads, {options.rounds} rounds; tok/s")
    for work, row in results.items():
        low, high = row["spread"]
        print(f"{work:>20}  miro {row['miro']:8.1f}  llama.cpp {row['llama.cpp']:8.1f}", end="")
        print(f"  ratio {row['ratio']:5.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
