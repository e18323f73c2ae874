"""The rounds of a comparison, and what comes out of them, with systems that only count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from miro_cy.tools.report import Spread
from peers.measure import Row, measure
from peers.works import SHORT, Chosen


class Counting:
    """Its figures are those it was given, one after the other."""

    def __init__(self, name: str, log: list[str], figures: Sequence[float]) -> None:
        self.name = name
        self._log = log
        self._figures = iter(figures)

    def version(self) -> dict[str, str | int]:
        return {"version": 1}

    def prompt(self, length: int) -> float:
        return self._next(f"prompt {length}")

    def decode(self, requests: int) -> float:
        return self._next(f"decode {requests}")

    def depths(self, depths: Sequence[int]) -> list[float]:
        return [self._next(f"depth {depth}") for depth in depths]

    def load(self) -> float:
        return self._next("load")

    def _next(self, what: str) -> float:
        self._log.append(f"{self.name}: {what}")
        return next(self._figures)


def compare(
    chosen: Chosen, first: Sequence[float], second: Sequence[float], rounds: int
) -> tuple[list[str], list[Row]]:
    log: list[str] = []
    a, b = Counting("a", log, first), Counting("b", log, second)
    return log, measure(a, b, chosen.works(layers=10), rounds, pause=lambda seconds: log.append("pause"))


def test_systems_take_turns_and_the_first_round_does_not_count() -> None:
    log, rows = compare(Chosen(prompts=(8,), requests=(1,)), [99, 4, 6, 99, 1, 1], [1, 2, 2, 1, 2, 4], 2)
    turns = ["a: prompt 8", "b: prompt 8"] * 3 + ["pause"]
    assert log == turns + ["a: decode 1", "b: decode 1"] * 3 + ["pause"]
    prompt, decode = rows
    assert (prompt.work, prompt.unit) == ("prompt of 8", "tok/s")
    assert (prompt.first, prompt.second) == (Spread(5, 4, 6), Spread(2, 2, 2))
    assert (prompt.ratios, prompt.ratio) == ([2, 3], Spread(2.5, 2, 3))
    assert (decode.work, decode.ratios) == ("decode, 1 request", [0.5, 0.25])


def test_of_times_less_is_better() -> None:
    _, (row,) = compare(Chosen(load="load to ready"), [9, 2.0], [9, 3.0], 1)
    assert (row.work, row.unit, row.ratios) == ("load to ready", "s", [1.5])


def test_attention_is_what_a_deep_token_takes_more_a_layer() -> None:
    log, rows = compare(Chosen(depths=(1900,)), [1, 1, 0.10, 0.14], [1, 1, 0.10, 0.20], 1)
    assert log[:2] == [f"a: depth {SHORT}", "a: depth 1900"]
    speed, attention = rows
    assert (speed.work, speed.unit) == ("decode at 1900", "tok/s")
    assert (speed.first.median, speed.second.median) == (pytest.approx(1 / 0.14), pytest.approx(5.0))
    assert (attention.work, attention.unit) == ("attention at 1900, a layer", "ms")
    assert (attention.first.median, attention.second.median) == (pytest.approx(4.0), pytest.approx(10.0))
    assert attention.ratios == pytest.approx([2.5])


def test_a_difference_that_is_not_above_zero_has_no_ratio() -> None:
    deep = Chosen(depths=(100,))
    _, (_, attention) = compare(deep, [1, 1, 0.2, 0.1, 0.1, 0.3], [1, 1, 0.1, 0.3, 0.1, 0.5], 2)
    assert attention.first.min == pytest.approx(-10)
    assert attention.ratios == pytest.approx([2.0]), "the other round's counts"
    _, (_, attention) = compare(deep, [1, 1, 0.1, 0.3], [1, 1, 0.2, 0.2], 1)
    assert (attention.ratios, attention.ratio) == ([], None)


def test_all_kinds_in_their_order() -> None:
    works = Chosen(prompts=(512, 256), requests=(1, 8), depths=(1900,), load="load").works(layers=1)
    assert [title for work in works for title, _ in work.rows] == [
        *("prompt of 512", "prompt of 256", "decode, 1 request", "decode, 8 requests"),
        *("decode at 1900", "attention at 1900, a layer", "load"),
    ]
