"""The simulated scheduler: the same seed gives the same figures, and these count what they say. No test looks at a time
of this computer.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import simulate
from miro_cy.sched.scheduler import SchedulerConfig
from simulation.figures import Figures, Waits, Waste, light
from simulation.plot import _Axes, svg
from simulation.variants import POLICIES, Machine, Row, Variant, capacity, overhead, sweep, variants
from simulation.workload import Range, Shape, make_workload
from simulation.world import Outcome, StepCost, World

#: Short enough for a test, in a pool that holds several.
SMALL = Shape(requests=150, clients=12, prompt=Range(40, 0.8, 2, 200), answer=Range(12, 0.6, 1, 50))
MACHINE = Machine(kv_tokens=4096)


def nothing(*_: Any) -> None:
    pass


def run(shape: Shape = SMALL, rate: float = 4.0, machine: Machine = MACHINE, **settings: Any) -> Outcome:
    return machine.run(shape, rate, machine.config(**settings), nothing)


def figures(*arguments: Any, **settings: Any) -> dict[str, Any]:
    """All but what depends on the computer."""
    made = asdict(Figures.of(run(*arguments, **settings), MACHINE.block_size))
    del made["overhead"]
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    settings = Variant(policy, 0.01).settings
    shape = replace(SMALL, arrivals="bursty", shared=0.5, prefix_tokens=64)
    assert figures(shape, **settings) == figures(shape, **settings)
    assert figures(shape, **settings) != figures(replace(shape, seed=1), **settings)


def test_percentiles_are_values_that_occurred() -> None:
    assert Waits.of(np.arange(1, 201) / 1000) == Waits(100, 190, 198, 200)
    assert Waits.of(np.array([0.25])) == Waits(250, 250, 250, 250)
    assert Waits.of(np.zeros(0)) == Waits(None, None, None, None)


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_arrivals_come_at_the_rate_that_was_asked_for(kind: Any) -> None:
    arrival = make_workload(Shape(requests=20_000, arrivals=kind), 5.0).arrival
    assert len(arrival) == 20_000
    assert np.all(np.diff(arrival) >= 0)
    assert arrival[-1] == pytest.approx(4000, rel=0.1)
    counts = np.bincount((arrival / 4).astype(int))  # of 20 requests on average
    dispersion = counts.var() / counts.mean()
    assert dispersion == pytest.approx(1, abs=0.15) if kind == "poisson" else dispersion > 10


def test_lengths_have_tails_and_limits() -> None:
    work = {kind: make_workload(Shape(requests=20_000, lengths=kind), 1.0) for kind in ("lognormal", "pareto")}
    for made in work.values():
        assert (made.n_prompt.min() >= 4, made.n_prompt.max() <= 2048) == (True, True)
        assert (made.answer.min() >= 1, made.answer.max() <= 1024) == (True, True)
        assert np.all((made.answer <= made.allowed) & (made.allowed <= 1024))
        assert np.median(made.n_prompt) == pytest.approx(160, rel=0.05)
        assert made.n_prompt.mean() > 1.3 * np.median(made.n_prompt)
        assert np.sum(made.n_prompt == made.n_prompt.max()) < 20, "no heap at the limit"


def test_prompts_share_their_beginning_only() -> None:
    work = make_workload(replace(SMALL, shared=0.5, prefixes=2, prefix_tokens=64), 1.0)
    prompts = [work.prompt(i) for i in range(len(work))]
    assert [len(prompt) for prompt in prompts] == work.n_prompt.tolist()
    sharing = [i for i in range(len(work)) if work.prefix[i] >= 0]
    assert 50 < len(sharing) < 100
    beginnings = {tuple(prompts[i][:64].tolist()) for i in sharing}
    assert len(beginnings) == 2
    rest = [int(prompts[i][64 if i in sharing else 0]) for i in range(len(work))]
    assert len(set(rest)) == len(work)


def test_light_clients_send_the_rarer_half() -> None:
    assert light(np.array([0, 0, 0, 1, 1, 2])).tolist() == [False, False, False, True, True, True]
    assert light(np.array([3, 3])).tolist() == [False, False]


def test_every_request_is_served_once_and_counted() -> None:
    out = run()
    assert not out.refused.any()
    work = out.workload
    assert np.all(out.first > work.arrival)
    assert np.all(out.last >= out.first)
    assert len(out.gaps) == work.answer.sum() - len(work)
    assert out.gaps.min() > 0
    assert out.computed == (work.n_prompt + work.answer - 1).sum(), "nothing is computed twice, nothing shared"
    assert out.seconds >= out.last.max()
    assert len(out.live) == len(out.step_s) == len(out.cpu_s)
    assert 0 < out.kv_mean < out.kv_peak <= 1


def test_the_clock_is_the_simulations_own() -> None:
    slow = StepCost(pass_ms=3_600_000)
    out = run(replace(SMALL, requests=3), machine=replace(MACHINE, cost=slow), step_ms=60_000.0)
    assert out.seconds > 3600
    assert np.all(out.first - out.workload.arrival > 3000)


def test_waste_is_half_a_block_and_reserving_wastes_more() -> None:
    shape = Shape(requests=1000, prompt=Range(60, 0.9, 2, 600), answer=Range(30, 0.7, 1, 120))
    machine = Machine(kv_tokens=16_384, cost=StepCost(row_key_us=0, token_key_us=0))
    waste = Waste.of(run(shape, 100.0, machine), 32)
    assert (waste.sequences, waste.expected) == (1000, 15.5)
    assert waste.as_expected
    assert waste.error < 0.4
    assert 30 < waste.max_tokens < waste.whole_context
    assert waste.whole_context > 500
    reserved = Waste.of(run(shape, 100.0, machine, admission="reserve"), 32)
    assert not reserved.as_expected
    assert reserved.mean > waste.max_tokens
    smaller = Waste.of(run(shape, 100.0, replace(machine, block_size=16)), 16)
    assert (smaller.expected, smaller.as_expected) == (7.5, True)


def test_a_pool_that_is_too_small_preempts_and_computes_again() -> None:
    shape = replace(SMALL, answer=Range(60, 0.5, 1, 200))
    tight = replace(MACHINE, kv_tokens=512)
    out = run(shape, 100.0, tight, watermark=0.0)
    made = Figures.of(out, 32)
    assert (made.served, made.kv_peak) == (150, 1.0)
    assert made.preemptions > 0
    assert 0 < made.recomputed_tokens == out.computed - (out.workload.n_prompt + out.workload.answer - 1).sum()
    kept = Figures.of(run(shape, 100.0, tight, admission="reserve"), 32)
    assert (kept.preemptions, kept.recomputed_tokens) == (0, 0)


def test_blocks_are_all_given_back() -> None:
    shape = replace(SMALL, shared=0.7, prefix_tokens=64)
    world = World(make_workload(shape, 50.0), SchedulerConfig(), StepCost(), kv_tokens=1024)
    world.run()
    world.scheduler.check_integrity()
    assert (world.scheduler.n_running, world.scheduler.n_waiting) == (0, 0)
    assert world.pool.n_free + world.pool.n_cached == world.pool.n_blocks


def test_shared_beginnings_are_computed_once() -> None:
    made = Figures.of(run(replace(SMALL, shared=1.0, prefixes=1, prefix_tokens=64), 1.0), 32)
    assert made.cached == pytest.approx(149 * 64 / (150 * 64 + make_workload(SMALL, 1).n_prompt.sum()), rel=0.05)
    assert made.recomputed_tokens == 0


def test_a_full_queue_refuses() -> None:
    made = Figures.of(run(SMALL, 1000.0, max_waiting=5), 32)
    assert made.served + made.refused == 150
    assert made.refused > 50


def test_each_policy_serves_those_it_favours() -> None:
    shape = replace(SMALL, requests=300)
    first, urgent, fair = (
        Figures.of(run(shape, 30.0, max_num_seqs=8, policy=policy), 32) for policy in ("fcfs", "priority", "fair")
    )
    assert urgent.ttft_urgent_ms.p95 is not None
    assert first.ttft_urgent_ms.p95 is not None
    assert fair.ttft_light_ms.p50 is not None
    assert first.ttft_light_ms.p50 is not None
    assert urgent.ttft_urgent_ms.p95 < 0.7 * first.ttft_urgent_ms.p95
    assert fair.ttft_light_ms.p50 < 0.7 * first.ttft_light_ms.p50


def test_capacity_is_a_rate_that_a_queue_lives_on() -> None:
    rate = capacity(MACHINE, SMALL, nothing)
    assert 1 < rate < 100
    over, under = (figures(SMALL, load * rate) for load in (4.0, 0.3))
    assert over["requests_per_s"] < 1.3 * rate
    assert under["ttft_ms"]["p95"] < over["ttft_ms"]["p50"]


def test_the_schedulers_own_cost_is_measured_with_that_many_live() -> None:
    own = overhead(MACHINE, SMALL, 40, nothing)
    assert own.live == 40
    assert 0 < own.live_us < own.step_us <= own.step_p99_us
    assert own.step_us == pytest.approx(40 * own.live_us)


def test_reservation_has_no_watermark() -> None:
    assert variants(["reserve", "fcfs"], [0.0, 0.1]) == [
        Variant("fcfs", 0.0), Variant("fcfs", 0.1), Variant("reserve", 0.0),
    ]  # fmt: skip


def rows_of(loads: list[float], watermarks: list[float]) -> list[Row]:
    shape = replace(SMALL, requests=30)
    chosen = variants(["fcfs", "reserve"], watermarks)
    return list(sweep(MACHINE, shape, 5.0, ["poisson", "bursty"], loads, chosen, nothing))


def test_the_plot_has_a_line_for_each_variant_in_each_panel() -> None:
    root = ElementTree.fromstring(svg(rows_of([0.5, 0.9, 1.2], [0.0, 0.1])))
    name = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f".//{name}polyline")
    assert len(lines) == 2 * 2 * 3
    left, top, right, bottom = 0, 0, 380, 200
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
        assert len(points) == 3
        assert all(left <= x <= right and top <= y <= bottom for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    texts = [text.text for text in root.findall(f".//{name}text")]
    assert {"fcfs 0 %", "fcfs 10 %", "reserve", "bursty: p99 time to first token, ms"} <= set(texts)
    assert ">1,000,000</text>" in "".join(_Axes([1.0], [0.5, 10**6]).grid())


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(simulate.main, ["--requests", "25", "--live", "8", *arguments])


def test_the_report_as_json(tmp_path: Path) -> None:
    done = invoke("--json", "--load", "0.5,2", "--policy", "fcfs,reserve", "--watermark", "0,0.05", "--block-size",
                  "16", "--arrivals", "poisson", "--pass-ms", "3", "--plot", str(tmp_path / "plot.svg"))  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert list(made) == [
        *("format", "format_version", "shape", "machine", "capacity_requests_per_s", "overhead", "rows"),
    ]
    assert (made["format"], made["format_version"]) == ("miro-simulate", 1)
    assert (made["shape"]["requests"], made["shape"]["seed"]) == (25, 0)
    assert (made["machine"]["block_size"], made["machine"]["cost"]["pass_ms"]) == (16, 3.0)
    assert [(row["load"], row["policy"], row["watermark"]) for row in made["rows"]] == [
        (load, *variant) for load in (0.5, 2.0) for variant in (("fcfs", 0.0), ("fcfs", 0.05), ("reserve", 0.0))
    ]
    row = made["rows"][0]
    assert set(row["ttft_ms"]) == set(row["gap_ms"]) == {"p50", "p95", "p99", "max"}
    assert (row["served"], row["refused"]) == (25, 0)
    assert row["waste"]["expected"] == 7.5
    assert (tmp_path / "plot.svg").read_text().startswith("<svg ")


def test_the_report_as_tables() -> None:
    done = invoke("--policy", "fair,reserve", "--seed", "3")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("25 requests of 100 clients, seed 3; a KV cache of 8,192 tokens; load 1 is ")
    head = lines.index(next(line for line in lines if line.startswith("arrivals")))
    table = [line.split()[:3] for line in lines[head + 1 : head + 5]]
    assert table == [[kind, "0.9", policy] for kind in ("poisson", "bursty") for policy in ("fair", "reserve")]
    assert len({len(line) for line in lines[head : head + 5]}) == 1, "columns line up"
    assert any("three standard errors of (block - 1) / 2 = 15.5" in line for line in lines)
    assert any(line.startswith("The scheduler with 8 live: ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--load", "0"), "0.01<=x<=10"),
        (("--policy", "fcfs,lottery"), "'lottery' is not one of"),
        (("--watermark", "0.9"), "0<=x<=0.5"),
        (("--kv-tokens", "64"), "the whole pool holds 64"),
    ],
)
def test_what_cannot_be_simulated(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code != 0
    assert words in done.stderr
    assert "Traceback" not in done.output
