"""How fast a model runs on this machine, by the engine's own steps, beside what the machine could do.

Each repetition goes through all works, the limits being measured before each, so that a machine whose speed drifts
drifts for both. `steps` says what of a work is timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import miro_cy
from miro_cy.config import EngineConfig
from miro_cy.hub import resolve
from miro_cy.inspect import inspect_model
from miro_cy.tools.cost import Cost, CostModel
from miro_cy.tools.limits import LimitProbe
from miro_cy.tools.load import LoadSample, time_load
from miro_cy.tools.plan import BenchPlan, Work
from miro_cy.tools.report import BenchReport, Load, Model, Row, Settings, this_machine
from miro_cy.tools.steps import Clock, Sample, StepBench, open_bench, with_room

#: progress(done, total, what is being done)
Progress = Callable[[int, int, str], None]


def run_bench(
    model: str | os.PathLike[str],
    plan: BenchPlan | None = None,
    *,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    **settings: Any,
) -> BenchReport:
    """Measure a model by path or name. settings: threads, compute, kv_dtype, max_context of EngineConfig.

    clock: what steps are timed with. Beside the model it takes a quarter of the free memory, at most 512 MiB.
    Raises ModelError as loading does, and ConfigError for what does not fit the model or the machine.
    """
    plan = plan or BenchPlan()
    tell = progress or (lambda done, total, what: None)
    path = resolve(model)
    about = inspect_model(path)
    asked = EngineConfig.build(None, settings)
    context = min(asked.max_context or about.max_context, about.max_context)
    works = plan.works(context)
    config = with_room(asked, about, works)
    loading = lambda done, total: tell(done, total, "loading")  # noqa: E731
    with open_bench(path, config, progress=loading, clock=clock, profile=plan.profile) as bench:
        executor = bench.parts.executor
        probe = LimitProbe(executor.threads)
        samples = _measure(bench, probe, works, plan.repeat, tell)
        weights = executor.weights
        kv_dtype = bench.parts.kv_dtype
        costs = CostModel(bench.parts.spec, weights, fast=executor.fast, kv_dtype=kv_dtype)
        report = BenchReport(
            miro=miro_cy.__version__,
            machine=this_machine(executor.isa, executor.threads),
            model=Model(
                name=about.name,
                format=about.format,
                parameters=about.parameters,
                layers=about.layers,
                file_bytes=about.bytes,
                packed_bytes=weights.nbytes,
                compute=executor.compute,
                kv_dtype=kv_dtype,
            ),
            settings=Settings(
                plan.repeat, plan.tokens, context, config.block_size, config.max_step_tokens, config.step_ms
            ),
            limits=probe.best,
            rows=[_row(work, samples[work], costs, probe, tiles=executor.compute == "bf16") for work in works],
        )
    if plan.load:  # when the memory of what was measured is free again
        report.load = Load.of(_time_loads(os.fspath(path), settings, plan.repeat, tell))
    return report


def _measure(
    bench: StepBench, probe: LimitProbe, works: list[Work], repeat: int, tell: Progress
) -> dict[Work, list[Sample]]:
    samples: dict[Work, list[Sample]] = {work: [] for work in works}
    total = (repeat + 1) * len(works)
    tell(0, total, "warming up")
    bench.warm_up()
    for repetition in range(repeat + 1):
        for index, work in enumerate(works):
            tell(repetition * len(works) + index, total, str(work))
            probe.measure()
            sample = bench.run(work)
            if repetition:  # the first one warms up
                samples[work].append(sample)
    tell(total, total, "done")
    return samples


def _row(work: Work, samples: list[Sample], costs: CostModel, probe: LimitProbe, *, tiles: bool) -> Row:
    # All repetitions do the same steps; should the scheduler once cut one otherwise, the median's cost is what counts.
    middle = sorted(samples, key=lambda sample: sample.seconds)[len(samples) // 2]
    cost = sum(map(costs.step, middle.steps), Cost())
    seconds = [sample.seconds for sample in samples]
    row = Row.of(
        work.kind,
        work.rows,
        work.depth,
        work.rows * work.tokens,
        len(middle.steps),
        seconds,
        cost,
        probe.best,
        tiles=tiles,
    )
    if middle.parts is not None:
        row.profile = {**middle.parts, "rest": max(0.0, middle.seconds - sum(middle.parts.values()))}
    return row


def _time_loads(path: str, settings: dict[str, Any], repeat: int, tell: Progress) -> list[LoadSample]:
    samples = []
    for repetition in range(repeat + 1):
        tell(repetition, repeat + 1, "loading in a process of its own")
        samples.append(time_load(path, settings))
    return samples[1:]  # the first one brings the file into the page cache
