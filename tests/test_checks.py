"""Settings and fields: whatever is put into one, the typed error that names it is all that may come of it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miro_client.checks import MAX_INT32, check_bool, check_choice, check_int, check_items, check_number, shown
from miro_client.errors import BadField, ConfigError
from miro_cy import EngineConfig, SamplingParams
from miro_cy.cache.block_pool import BlockPool
from miro_cy.cache.block_table import BlockTables
from miro_cy.cache.prefix import PrefixIndex
from miro_cy.config import parse_bytes
from miro_cy.requests import Request
from miro_cy.sched.scheduler import SchedulerConfig
from miro_cy.tools.plan import BenchPlan, Work
from miro_worker import WorkerConfig

SHARED = runpy.run_path(str(Path(__file__).parent / "junk.py"))
JUNK, HUGE, Hostile, Shy, check = (SHARED[name] for name in ("JUNK", "HUGE", "Hostile", "Shy", "check"))


def fields(*makers: Callable[..., Any]) -> list[tuple[Callable[..., Any], str]]:
    return [(make, name) for make in makers for name in make.__dataclass_fields__]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("make", "name"), fields(EngineConfig, SchedulerConfig, WorkerConfig))
@given(value=JUNK)
def test_settings(make: Callable[..., Any], name: str, value: Any) -> None:
    check(make, {name: value}, ConfigError, name)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [(BlockPool, ["n_blocks", "block_size"]), (BlockTables, ["n_groups", "n_slots", "max_blocks"]),
     (PrefixIndex, ["n_blocks", "block_size", "hash_bits"])],
)  # fmt: skip
@given(value=JUNK.filter(lambda value: not (isinstance(value, int) and 2**16 < value < 2**31)), at=st.integers(0, 2))
def test_sizes_of_the_pool(make: Callable[..., Any], sizes: list[str], value: Any, at: int) -> None:
    name = sizes[at % len(sizes)]
    check(make, {**dict.fromkeys(sizes, 1), name: value}, ConfigError, name)


@given(value=JUNK)
def test_sizes_in_bytes(value: Any) -> None:
    check(parse_bytes, {"value": value, "field": "kv_memory"}, ConfigError, "kv_memory")


@pytest.mark.parametrize(("make", "name"), fields(BenchPlan))
@given(value=JUNK, inside=st.booleans())
def test_bench_plans(make: Callable[..., Any], name: str, value: Any, inside: bool) -> None:
    named = {"prompts": "prompt", "depths": "depth"}.get(name, name)
    check(make, {name: [value] if inside else value}, ConfigError, named)


@pytest.mark.parametrize("kind", ["prompt", "decode"])
@pytest.mark.parametrize("name", ["kind", "rows", "depth", "tokens"])
@given(value=JUNK)
def test_works_of_a_bench(kind: str, name: str, value: Any) -> None:
    work = {"kind": kind, "rows": 1, "depth": int(kind == "decode"), "tokens": 1, name: value}
    check(Work, work, ConfigError, "prompt" if (kind, name) == ("prompt", "tokens") else name)


@pytest.mark.parametrize("name", [name for _, name in fields(SamplingParams)])
@given(value=JUNK, inside=st.booleans())
def test_sampling_parameters(name: str, value: Any, inside: bool) -> None:
    check(SamplingParams, {name: [value] if inside else value}, BadField, name)


@pytest.mark.parametrize("at", range(9))
def test_unknown_sampling_parameters(at: int) -> None:
    key = (HUGE, (HUGE,), Hostile(), Shy(), "\ud800", "x" * 10_000, None, 1.5, b"temperature")[at]
    check(SamplingParams.from_mapping, {"mapping": {key: 1}}, BadField, "")
    with pytest.raises(BadField, match="unknown sampling parameter"):
        SamplingParams.from_mapping({key: 1})


@pytest.mark.parametrize("name", ["priority", "client", "queue_ms", "deadline_ms"])
@given(value=JUNK)
def test_requests(name: str, value: Any) -> None:
    check(Request, {"prompt": "x", name: value}, BadField, name)


def test_values_as_errors_show_them() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert shown("x" * 100) == f"'{'x' * 79}"
    assert len(shown("x" * 1000, 200)) == 200
    assert shown(HUGE) == "a value of type int"
    assert shown(Hostile()) == "a value of type Hostile"
    assert shown([Hostile()]) == "a value of type list"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: check_int("n", 8, 1, 7), "n must be an integer between 1 and 7, not 8"),
        (lambda: check_int("n", True, 0, 7), "n must be an integer between 0 and 7, not True"),
        (lambda: check_number("x", 0, 2**53), "x must be a number, above 0 and at most 9007199254740992, not 0"),
        (lambda: check_number("x", 0.6, 0.5, zero=True), "x must be a number, at least 0 and at most 0.5, not 0.6"),
        (lambda: check_bool("b", 1), "b must be true or false, not 1"),
        (lambda: check_choice("c", "d", (None, "a", "b")), "c must be one of 'a', 'b', not 'd'"),
        (lambda: check_choice("c", True, (0, 1)), "c must be one of 0, 1, not True"),
        (lambda: check_items("l", "ab", 2), "l must be a list of integers, not 'ab'"),
        (lambda: check_items("l", [1, 2, 3], 2, what="ids"), "l takes at most 2 ids, got more"),
    ],
)
def test_a_refusal_names_field_limits_and_value(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refused()
    assert caught.value.message == message
    assert caught.value.field == message.split()[0]


def test_values_at_their_limits() -> None:
    for good in (1, 7):
        check_int("n", good, 1, 7)
    check_number("x", 0.5, 0.5)
    check_number("x", 0, 0.5, zero=True)
    check_choice("c", None, (None, "a"))
    assert check_items("l", iter((1, 2)), 2) == [1, 2]


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_step_tokens", "max_waiting", "step_ms", "ageing_ms", "watermark"]
)
def test_engine_and_scheduler_have_one_limit(name: str) -> None:
    def message(make: Callable[..., object], value: object) -> str:
        try:
            make(**{name: value})
        except ConfigError as error:
            return error.message
        return ""

    for value in (0, 1e-9, 0.5, 1, 4096, 4097, 60_000, 60_001.0, 2**16, 2**16 + 1, 2**20, 2**20 + 1, 3_600_001, 2**70):
        assert message(EngineConfig, value) == message(SchedulerConfig, value)
    assert "not 1180591620717411303424" in message(SchedulerConfig, 2**70)


@pytest.mark.parametrize("name", WorkerConfig.__dataclass_fields__)
def test_a_worker_names_both_limits(name: str) -> None:
    low = 0 if name in ("grace_ms", "linger_ms") else 1
    for good in (low, MAX_INT32):
        assert getattr(WorkerConfig(**{name: good}), name) == good
    for bad in (low - 1, MAX_INT32 + 1):
        with pytest.raises(ConfigError, match=f"^{name} must be an integer between {low} and {MAX_INT32}, not {bad}$"):
            WorkerConfig(**{name: bad})
