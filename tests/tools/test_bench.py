"""`run_bench` on small models with a clock that ticks: what it measures, in which terms, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from miro_cy import Engine
from miro_cy._kernels.select import TILES, active_isa, has_tiles
from miro_cy.config import Compute, EngineConfig
from miro_cy.errors import ConfigError, InternalError, ModelNotFound
from miro_cy.inspect import inspect_model
from miro_cy.memory import packed_bytes, rope_bytes, step_bytes
from miro_cy.model.executor import PARTS
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.weights import packable_parts
from miro_cy.tools import steps
from miro_cy.tools.bench import run_bench
from miro_cy.tools.cost import Cost
from miro_cy.tools.limits import Limits
from miro_cy.tools.load import LoadSample
from miro_cy.tools.plan import BenchPlan, Work
from miro_cy.tools.report import Row

FAST, EXACT = "gguf/Q4_1.gguf", "hf/llama"
SMALL = BenchPlan(prompts=(40,), rows=(1, 3), depths=(5, 20), tokens=4, repeat=2)
Golden = Callable[[str], Path]


def numbers(value: Any) -> list[float]:
    """All the numbers of a JSON value."""
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def check_limits(limits: dict[str, Any]) -> None:
    assert all(math.isfinite(figure) and figure >= 0 for figure in numbers(limits))
    assert {name for name, figure in limits.items() if figure == 0} == (set() if has_tiles() else {"tile_gflops"})


@pytest.mark.parametrize("name", [FAST, EXACT])
def test_report_describes_itself(golden: Golden, name: str) -> None:
    report = json.loads(json.dumps(asdict(run_bench(golden(name), SMALL, threads=2))))
    assert (report["format"], report["format_version"]) == ("miro-bench", 1)
    assert report["machine"]["isa"] == active_isa()
    assert report["machine"]["threads"] == 2
    fast = name == FAST
    assert (report["model"]["compute"], report["model"]["kv_dtype"]) == (
        ("fast", "fp16") if fast else ("exact", "fp32")
    )
    assert report["settings"] | {"repeat": 2, "tokens": 4, "context": 512, "max_step_tokens": 512} == report["settings"]
    assert [(r["work"], r["rows"], r["depth"], r["tokens"], r["steps"]) for r in report["rows"]] == [
        ("prompt", 1, 0, 40, 1),
        ("decode", 1, 5, 4, 4),
        ("decode", 3, 5, 12, 4),
        ("decode", 1, 20, 4, 4),
        ("decode", 3, 20, 12, 4),
    ]
    for row in report["rows"]:
        figures = numbers({key: row[key] for key in row if key != "depth"})
        assert all(math.isfinite(figure) and figure > 0 for figure in figures)
        assert row["bound"] == ("compute" if row["share_of_flops"] > row["share_of_bandwidth"] else "bandwidth")
        assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
    check_limits(report["limits"])


def test_rates_are_work_over_time(golden: Golden, clock: Any) -> None:
    report = run_bench(golden(FAST), SMALL, threads=1, clock=clock)
    for row in report.rows:
        seconds = 0.25 * row.steps
        assert (row.seconds.median, row.seconds.min, row.seconds.max) == (seconds, seconds, seconds)
        assert row.tokens_per_second == row.tokens / seconds
    one, three = report.rows[1], report.rows[2]
    assert three.gflops == pytest.approx(3 * one.gflops)
    assert one.gb_per_s < three.gb_per_s < 2 * one.gb_per_s, "rows share the weights, not the KV cache"
    assert one.share_of_bandwidth == pytest.approx(one.gb_per_s / report.limits.read_gb_per_s)


def test_a_row_names_the_nearer_limit() -> None:
    limits = Limits(read_gb_per_s=10.0, read_bytes=1, fma_gflops=100.0, int8_gflops=400.0)
    row = Row.of("decode", 2, 7, 8, 4, [3.0, 1.0, 2.0], Cost(int8_ops=80e9, float_ops=20e9, bytes=2e9), limits)
    assert (row.seconds.median, row.seconds.min, row.seconds.max) == (2.0, 1.0, 3.0)
    assert (row.tokens_per_second, row.gflops, row.gb_per_s) == (4.0, 50.0, 1.0)
    assert row.share_of_flops == pytest.approx((80 / 400 + 20 / 100) / 2)
    assert (row.share_of_bandwidth, row.bound) == (pytest.approx(0.1), "compute")
    row = Row.of("decode", 2, 7, 8, 4, [2.0], Cost(int8_ops=8e9, float_ops=2e9, bytes=2e9), limits)
    assert row.bound == "bandwidth"


def test_only_the_rows_tokens_are_counted(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed decode step carries a token of each row, and no prompt, also where prompts take many steps."""
    seen: list[tuple[Any, steps.Sample]] = []
    run = steps.StepBench.run

    def spy(self: Any, work: Work) -> steps.Sample:
        sample = run(self, work)
        seen.append((work, sample))
        return sample

    monkeypatch.setattr(steps.StepBench, "run", spy)
    run_bench(golden(FAST), BenchPlan(prompts=(300,), rows=(7,), depths=(150,), tokens=5, repeat=1), threads=1)
    assert len(seen) == 4
    for work, sample in seen:
        if work.kind == "prompt":
            assert [step for step in sample.steps if len(step) != 1] == []
            assert sum(n_tok for ((_, n_tok, _),) in sample.steps) == 300
            continue
        assert len(sample.steps) == 5
        for step in sample.steps:
            assert [(n_tok, n_log) for _, n_tok, n_log in step] == [(1, 1)] * 7
            assert min(first for first, _, _ in step) >= 150


def test_prompts_differ(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a prefix that is still in the cache would be measured."""
    prompts: list[bytes] = []
    add = Engine.add

    def spy(self: Engine, request: Any) -> int:
        prompts.append(request.prompt["tokens"].tobytes())
        return add(self, request)

    monkeypatch.setattr(Engine, "add", spy)
    run_bench(golden(FAST), BenchPlan(prompts=(40,), rows=(3,), depths=(40,), tokens=2, repeat=2), threads=1)
    assert len(prompts) == len(set(prompts)) == 1 + 3 * (1 + 3)


def test_progress_counts_to_its_end(golden: Golden) -> None:
    told: list[tuple[int, int, str]] = []
    plan = BenchPlan(prompts=(8,), rows=(1,), depths=(2,), tokens=1, repeat=2)
    run_bench(golden(FAST), plan, threads=1, progress=lambda *event: told.append(event))
    works = [event for event in told if event[2] != "loading"]
    assert (0, 6, "prompt of 8") in works
    assert (3, 6, "decode of 1 row at 2") in works
    assert works[-1][:2] == (6, 6)
    assert works == sorted(works, key=lambda event: event[0])
    assert len(told) > len(works)


def test_settings_reach_the_engine(golden: Golden) -> None:
    plan = BenchPlan(rows=(2,), depths=(3,), tokens=2, repeat=1)
    report = run_bench(golden(FAST), plan, threads=1, compute="exact", max_context=64)
    assert (report.model.compute, report.model.kv_dtype, report.settings.context) == ("exact", "fp32", 64)
    assert report.rows[0].tokens == 63, "the default prompt leaves room for its first token"
    assert run_bench(golden(FAST), plan, threads=1, kv_dtype="fp32", max_context=64).model.kv_dtype == "fp32"


@pytest.mark.parametrize("rows", [4, 5])
def test_compute_is_what_an_engine_for_so_many_rows_does(golden: Golden, rows: int) -> None:
    plan = BenchPlan(prompts=(), rows=(rows,), depths=(3,), tokens=2, repeat=1)
    report = run_bench(golden(FAST), plan, threads=1, max_context=64)
    tiles = rows == 5 and has_tiles()
    assert (report.model.compute, report.model.kv_dtype) == (("bf16", "bf16") if tiles else ("fast", "fp16"))
    assert report.machine.isa == (TILES if tiles else active_isa())


def test_compute_modes_that_round_can_be_asked_for(golden: Golden, quantised_mode: Compute) -> None:
    plan = BenchPlan(prompts=(9,), rows=(2,), depths=(3,), tokens=2, repeat=1)
    report = run_bench(golden(FAST), plan, threads=1, compute=quantised_mode, max_context=64)
    dtype = "bf16" if quantised_mode == "bf16" else "fp16"
    assert (report.model.compute, report.model.kv_dtype) == (quantised_mode, dtype)
    check_limits(asdict(report.limits))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rows": (0,)}, "rows"),
        ({"rows": (257,)}, "rows"),
        ({"rows": ()}, "rows"),
        ({"rows": tuple(range(1, 257)), "depths": (1, 2, 3)}, "rows"),
        ({"prompts": (0,)}, "prompt"),
        ({"depths": (True,)}, "depth"),
        ({"tokens": 0}, "tokens"),
        ({"repeat": 0}, "repeat"),
        ({"repeat": 1.5}, "repeat"),
    ],
)
def test_a_plan_out_of_range_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        BenchPlan(**fields)
    assert error.value.field == named


def test_what_does_not_fit_is_refused(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for plan, named in ((BenchPlan(prompts=(512,)), "prompt"), (BenchPlan(depths=(490,)), "depth")):
        with pytest.raises(ConfigError, match="needs a context of 5") as error:
            run_bench(golden(FAST), plan, threads=1)
        assert error.value.field == named
    with pytest.raises(ConfigError) as error:
        run_bench(golden(FAST), SMALL, threads=1, max_context=513)
    assert error.value.field == "max_context"
    # Weights and buffers need room beside the cache.
    about, works = inspect_model(golden(FAST)), SMALL.works(512)
    config = EngineConfig(threads=1)
    needed = steps.with_room(config, about, works).kv_memory
    with open_checkpoint(golden(FAST)) as checkpoint:
        largest = EngineConfig(threads=1, max_num_seqs=3)
        beside = packed_bytes(packable_parts(checkpoint)) + step_bytes(checkpoint.spec, largest, 1)
        tables = rope_bytes(checkpoint.spec, 512)
    for free, enough in ((1000, False), (beside + needed, False), (beside + needed + tables, True)):
        monkeypatch.setattr(steps, "available_memory", lambda free=free: free)
        if enough:
            assert steps.with_room(config, about, works).kv_memory == needed
            continue
        with pytest.raises(ConfigError, match=f"these rows need .*, but of {free:,} bytes the weights take") as error:
            run_bench(golden(FAST), SMALL, threads=1)
        assert error.value.field == "rows"
    with pytest.raises(ModelNotFound):
        run_bench("no-such-model")


def test_a_step_that_fails_ends_the_run(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    from miro_cy.model.executor import CpuExecutor

    class Broken:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._inner = CpuExecutor(*arguments, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def forward(self, view: Any) -> None:
            raise RuntimeError("broken")

    monkeypatch.setattr("miro_cy.loading.CpuExecutor", Broken)
    with pytest.raises(InternalError, match="broken"):
        run_bench(golden(FAST), SMALL, threads=1)


def test_a_profile_accounts_for_the_time_of_the_steps(golden: Golden) -> None:
    plan = BenchPlan(prompts=(40,), rows=(2,), depths=(5,), tokens=4, repeat=1, profile=True)
    for row in run_bench(golden(FAST), plan, threads=2).rows:
        assert row.profile is not None
        assert set(row.profile) == {*PARTS, "rest"}
        # with int8 weights SwiGLU is a part of gate_up
        assert all(seconds > 0 for part, seconds in row.profile.items() if part != "swiglu")
        assert sum(row.profile.values()) == pytest.approx(row.seconds.median)
    assert all(row.profile is None for row in run_bench(golden(FAST), SMALL, threads=1).rows)


def test_exactly_these_works_are_measured(golden: Golden) -> None:
    works = (Work("decode", 2, 7, 3), Work("prompt", 1, 0, 9), Work("decode", 1, 5, 4))
    report = run_bench(golden(FAST), BenchPlan(exactly=works, repeat=1), threads=1)
    assert [(r.work, r.rows, r.depth, r.tokens) for r in report.rows] == [
        ("decode", 2, 7, 6),
        ("prompt", 1, 0, 9),
        ("decode", 1, 5, 4),
    ]


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (("prompt", 1, 0, 0), "prompt"),
        (("prompt", 2, 0, 9), "rows"),
        (("prompt", 1, 5, 9), "depth"),
        (("decode", 257, 5, 9), "rows"),
        (("decode", 1, 0, 9), "depth"),
        (("decode", 1, 5, 2**16 + 1), "tokens"),
    ],
)
def test_a_work_out_of_range_is_refused(work: Any, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        Work(*work)
    assert error.value.field == named


def test_one_row_fits_a_context_of_2048_at_depth_1900() -> None:
    assert BenchPlan(rows=(1,), depths=(1900,), tokens=64).works(2048)[1] == Work("decode", 1, 1900, 64)


def test_loading_is_timed_after_the_rest_and_only_when_asked(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((9.0, 3.0, 1.0, 2.0))
    asked: list[tuple[str, dict[str, Any]]] = []

    def time_load(model: str, settings: dict[str, Any]) -> LoadSample:
        asked.append((model, settings))
        seconds = next(times)
        return LoadSample(seconds, 2 * seconds, int(100 * seconds), 7)

    monkeypatch.setattr("miro_cy.tools.bench.time_load", time_load)
    plan = BenchPlan(prompts=(8,), rows=(1,), depths=(2,), tokens=1, repeat=3, load=True)
    load = run_bench(golden(FAST), plan, threads=1, compute="exact").load
    assert load is not None
    assert (load.seconds.median, load.seconds.min, load.seconds.max) == (2.0, 1.0, 3.0), "the first one warms up"
    assert (load.memory_bytes.median, load.memory_bytes.max, load.pool_bytes) == (200, 300, 7)
    assert asked == [(str(golden(FAST)), {"threads": 1, "compute": "exact"})] * 4
    assert run_bench(golden(FAST), SMALL, threads=1).load is None
