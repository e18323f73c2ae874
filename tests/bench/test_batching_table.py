"""The four ways to serve the same requests: what each computes and holds, and what is printed; not how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import batching_table
from batching import report
from batching.engine import Stepper, Task, open_model
from batching.ways import WAYS, Sample, fitting, interrupt, p99, sample, serve
from miro_cy.errors import ConfigError
from miro_cy.loading import Parts
from peers import result

MODEL = Path(__file__).parents[1] / "data" / "golden" / "gguf" / "Q4_1.gguf"
TASK = Task(requests=4, prompt=6, new=5, long=70, reserve=64, sequential=2, stagger=2)
BLOCK = 32


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    with open_model(MODEL, TASK, 1) as opened:
        yield opened


class Log:
    """What each step of a stepper carried: (rows, tokens)."""

    def __init__(self, stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int]] = []
        forward = stepper.meter.forward

        def logged(view: Any) -> Any:
            self.steps.append((view.n_rows, view.n_tokens))
            return forward(view)

        monkeypatch.setattr(stepper.meter, "forward", logged)


def test_whole_prompts_go_through_in_one_step_and_chunks_do_not(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Stepper(parts, TASK, whole=True)
    log = Log(whole, monkeypatch)
    gaps, ttft = interrupt(whole, TASK)
    assert (len(gaps), ttft > 0) == (4, True), "one step, in which each stream gets a token"
    assert (5, 4 + 70) in log.steps
    chunked = Stepper(parts, TASK, whole=False)
    log = Log(chunked, monkeypatch)
    gaps, _ = interrupt(chunked, TASK)
    assert len(gaps) > 4, "a scheduler that has seen no prompt begins with small chunks"
    assert len(gaps) % 4 == 0
    assert max(tokens for _, tokens in log.steps) < 4 + 70
    for stepper in (whole, chunked):
        stepper.core.check_integrity()
        assert not stepper.core.has_work


def test_requests_that_are_batched_share_their_steps(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(parts, TASK, whole=True)
    log = Log(stepper, monkeypatch)
    assert serve(stepper, [0, 0, 0, 0], TASK)[1] == 4 * 5
    assert log.steps == [(4, 24)] + [(4, 4)] * 4
    log.steps.clear()
    assert serve(stepper, [0, 2, 4, 6], TASK)[1] == 4 * 5
    assert [rows for rows, _ in log.steps] == [1, 1, 2, 2, 3, 2, 3, 2, 2, 1, 1]


def test_memory_is_what_was_in_use(parts: Parts) -> None:
    stepper = Stepper(parts, TASK, whole=True)
    naive, static, continuous, _ = WAYS
    assert sample(naive, stepper, TASK, 100, BLOCK).kv_bytes == 4 * 64 * 100, "reckoned, not measured"
    assert sample(static, stepper, TASK, 100, BLOCK).kv_bytes == 4 * BLOCK * 100
    made = sample(continuous, stepper, TASK, 100, BLOCK)
    assert made.kv_bytes == 3 * BLOCK * 100, "the first has ended before the last comes"
    assert made.gap_ms is not None
    assert made.ttft_ms is not None
    assert sample(static, stepper, TASK, 100, BLOCK).gap_ms is None


def test_one_at_a_time_runs_that_many_alone(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(parts, TASK, whole=True)
    log = Log(stepper, monkeypatch)
    sample(WAYS[0], stepper, TASK, 100, BLOCK)
    assert log.steps == ([(1, 6)] + [(1, 1)] * 4) * 2


@pytest.mark.parametrize(
    ("task", "block", "expected"),
    [
        (Task(), 32, 25),  # 128 blocks, 5 each for the 159 tokens that are stored
        (Task(), 16, 25),
        (Task(reserve=160), 32, 8),
        (Task(requests=4, prompt=33, new=1, reserve=64), 32, 4),
        (Task(requests=4, prompt=32, new=1, reserve=64), 32, 8),
    ],
)
def test_sequences_in_the_same_memory(task: Task, block: int, expected: int) -> None:
    assert fitting(task, block) == expected


def test_p99_is_one_of_the_gaps() -> None:
    assert p99([float(i) for i in range(1, 101)]) == 99
    assert p99([3.0, 1.0]) == 3


@pytest.fixture
def made() -> dict[str, Any]:
    samples = {
        "naive": [Sample(10.0, 4_000_000), Sample(20.0, 4_000_000)],
        "static": [Sample(30.0, 2_000_000), Sample(50.0, 2_000_000)],
        "continuous": [Sample(40.0, 2_000_000, 800.0, 0.9e3), Sample(60.0, 1_900_000, 900.0, 1.0e3)],
        "chunked": [Sample(40.0, 2_000_000, 200.0, 2.0e3), Sample(50.0, 2_000_000, 100.0, 3.0e3)],
    }
    return report.result_of(report.Result(Task(), samples, 18.0, 32, 1000, 25), MODEL, 2)


def test_a_result_as_json(made: dict[str, Any]) -> None:
    made = json.loads(json.dumps(made))
    assert (made["format"], made["format_version"], made["rounds"]) == ("miro-batching", 1, 2)
    assert {"date", "machine", "model", "miro", "threads"} <= set(made)
    assert made["task"]["reserve"] == 512
    naive, _, continuous, _ = made["rows"]
    assert naive["tokens_per_s"] == {"median": 15, "min": 10, "max": 20}
    assert (naive["gap_p99_ms"], naive["long_ttft_ms"]) == (None, None)
    assert continuous["gap_p99_ms"] == {"median": 850, "min": 800, "max": 900}
    assert continuous["kv_bytes"] == 2_000_000
    assert made["ratios"] == {
        "static_over_naive": {"median": 2.75, "min": 2.5, "max": 3},
        "continuous_over_naive": {"median": 3.5, "min": 3, "max": 4},
        "chunked_over_naive": {"median": 3.25, "min": 2.5, "max": 4},
        "gap_cut_by_chunks": {"median": 6.5, "min": 4, "max": 9},
    }
    assert made["same_memory"] == {"bytes": 4_096_000, "contiguous_sequences": 8, "paged_sequences": 25}
    assert made["goal_tokens_per_s"] is None


def test_the_table(made: dict[str, Any]) -> None:
    lines = list(report.lines_of(made))
    head = lines.index(next(line for line in lines if "p99 gap" in line))
    assert len({len(line) for line in lines[head : head + 5]}) == 1, "columns line up"
    assert lines[head + 1].split() == [
        *("one", "at", "a", "time,", "contiguous", "15.0", "(10.0", "to", "20.0)", "4.0", "-", "-"),
    ]
    assert lines[head + 3].split()[2:] == [
        *("50.0", "(40.0", "to", "60.0)", "2.0", "850", "(800", "to", "900)", "0.95", "(0.90", "to", "1.00)"),
    ]
    assert "p99 gap, whole prompts over chunks   6.50 (4.00 to 9.00)" in lines
    assert "in 4.1 MB of KV cache: 8 sequences that reserve 512 tokens each, 25 paged (+212 %)" in lines
    assert lines[-1] == "reading memory: 18.0 GB/s"
    assert next(iter(reversed(list(report.lines_of({**made, "goal_tokens_per_s": 34.0}))))) == (
        "reading memory: 18.0 GB/s; goal at that bandwidth: 34.0 tok/s"
    )


@pytest.mark.parametrize(
    ("parameters", "kind", "goal"), [(1.1e9, "F16", 17.0), (1.1e9, "Q8_0", None), (1.35e8, "F16", None)]
)
def test_the_goal_follows_the_bandwidth_and_belongs_to_one_model(
    parameters: float, kind: str, goal: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = report.inspect_model(MODEL)
    (share, *_) = about.types.values()
    types = {"F32": replace(share, parameters=1), kind: replace(share, parameters=9)}
    monkeypatch.setattr(report, "inspect_model", lambda path: replace(about, parameters=int(parameters), types=types))
    assert report.goal_of(MODEL, 9.0) == goal


def test_the_room_that_a_task_needs() -> None:
    assert Task().stream == 16 + (8 * 32 + 1500) // 8
    assert Task(new=1000).context == 1501
    assert Task(new=2000).context == 2032
    with pytest.raises(ConfigError, match="601 tokens are needed"), open_model(MODEL, replace(TASK, long=600), 1):
        pass


def run(*arguments: str) -> Result:
    sizes = ("--requests", "3", "--prompt", "5", "--new", "4", "--long", "40", "--threads", "1", "--rounds", "2")
    return CliRunner().invoke(batching_table.main, [str(MODEL), *sizes, *arguments])


def test_the_whole_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_table, "save", lambda made, kind: result.save(made, tmp_path, kind=kind))
    done = run("--json", "--save")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [row["way"] for row in made["rows"]] == ["naive", "static", "continuous", "chunked"]
    assert all(row["tokens_per_s"]["median"] > 0 for row in made["rows"])
    (saved,) = tmp_path.glob("????-??-??-batching-q4-1-*.json")
    assert json.loads(saved.read_text()) == made
    assert saved.name in done.stderr


def test_what_goes_wrong_is_one_line() -> None:
    done = run("--long", "900")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "901 tokens are needed, the model was made for 512" in done.stderr
    assert run("--requests", "1").exit_code == 2
