"""miro as a system: by the engine's steps, as llama.cpp's own programs measure, or by whole requests, as its server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import miro_cy
from miro_cy import Engine, SamplingParams
from miro_cy.config import EngineConfig
from miro_cy.inspect import inspect_model
from miro_cy.loading import Parts
from miro_cy.tools.load import time_load
from miro_cy.tools.plan import BenchPlan, Work
from miro_cy.tools.steps import StepBench, open_bench, with_room
from peers.works import NEW, SHORT, Chosen

#: Tokens of a sequence that both systems make room for; more where a work needs more.
CONTEXT = 2048


def context_of(chosen: Chosen) -> int:
    """Tokens that a sequence of these works may have."""
    return max([CONTEXT, *(work.room for work in _works(chosen))])


def config_of(path: Path, chosen: Chosen, threads: int) -> EngineConfig:
    """Settings with room for the works. Raises ConfigError when the model or the machine has none."""
    about = inspect_model(path)
    context = min(context_of(chosen), about.max_context)
    works = BenchPlan(exactly=_works(chosen)).works(context)
    return with_room(EngineConfig.build(None, {"threads": threads, "max_context": context}), about, works)


def _works(chosen: Chosen) -> tuple[Work, ...]:
    works = [Work("decode", 1, SHORT, NEW), *(Work("prompt", 1, 0, length) for length in chosen.prompts)]
    works += [Work("decode", requests, SHORT, NEW) for requests in chosen.requests]
    return (*works, *(Work("decode", 1, depth, NEW) for depth in chosen.depths))


def _arithmetic_of(parts: Parts) -> tuple[str, str, str]:
    return parts.executor.compute, parts.isa, parts.kv_dtype


class _Miro:
    name = "miro"

    def version(self) -> dict[str, str | int]:
        return {"version": miro_cy.__version__}


class Steps(_Miro):
    """A step's time is the engine's, without what a request costs around it; `miro bench` measures the same."""

    def __init__(self, bench: StepBench, path: Path, config: EngineConfig) -> None:
        self._bench = bench
        self._path = path
        self._settings = {"threads": config.threads, "max_context": config.max_context}

    @property
    def arithmetic(self) -> tuple[str, str, str]:
        """Compute mode, kernels and KV dtype."""
        return _arithmetic_of(self._bench.parts)

    def prompt(self, length: int) -> float:
        return length / self._bench.run(Work("prompt", 1, 0, length)).seconds

    def decode(self, requests: int) -> float:
        return requests * NEW / self._bench.run(Work("decode", requests, SHORT, NEW)).seconds

    def depths(self, depths: Sequence[int]) -> list[float]:
        return [self._bench.run(Work("decode", 1, depth, NEW)).seconds / NEW for depth in depths]

    def load(self) -> float:
        """A whole process, from its start to its end after a first token."""
        return time_load(str(self._path), self._settings, first_token=True).process_seconds


class Requests(_Miro):
    """Engine.generate with a server's settings."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._rng = np.random.default_rng(0)

    @property
    def arithmetic(self) -> tuple[str, str, str]:
        """Compute mode, kernels and KV dtype."""
        return _arithmetic_of(self._engine._parts)

    def prompt(self, length: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=1)
        return 1000 * length / self._engine.generate(self._prompt(length), params).timing.prefill_ms

    def decode(self, requests: int) -> float:
        done = self._engine.generate([self._prompt(SHORT) for _ in range(requests)], _decoding())
        return 1000 * (NEW - 1) * requests / max(c.timing.decode_ms for c in done)

    def depths(self, depths: Sequence[int]) -> list[float]:
        done = [self._engine.generate(self._prompt(depth), _decoding()) for depth in depths]
        return [c.timing.decode_ms / 1000 / (NEW - 1) for c in done]

    def load(self) -> float:
        """Engine.load alone, imports being done."""
        config = self._engine.config
        return time_load(str(self._path), {"threads": config.threads, "max_context": config.max_context}).seconds

    def _prompt(self, length: int) -> dict[str, list[int]]:
        return {"tokens": self._rng.integers(0, self._engine.vocab_size, length).tolist()}


def _decoding() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@contextmanager
def by_steps(path: Path, chosen: Chosen, threads: int) -> Iterator[Steps]:
    """miro, loaded. Raises as loading does."""
    config = config_of(path, chosen, threads)
    with open_bench(path, config) as bench:
        bench.warm_up()
        yield Steps(bench, path, config)


@contextmanager
def by_requests(path: Path, chosen: Chosen, threads: int) -> Iterator[Requests]:
    """miro, loaded. Raises as loading does."""
    config = config_of(path, chosen, threads)
    with Engine.load(path, config=EngineConfig.build(config, {"step_ms": EngineConfig().step_ms})) as engine:
        yield Requests(engine, path)
