"""Rounds in which systems take turns, and the ratios that come out of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miro_cy.tools.report import Spread
from peers.works import System, Unit, Work

#: Between works, for the machine to come to rest.
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of two systems. ratios: of the rounds, how many times as fast the first system is as the second; a
    round has none when one of its figures is not above zero, as a difference of two times may come out.
    """

    work: str
    unit: Unit
    first: Spread
    second: Spread
    ratios: list[float]

    @property
    def ratio(self) -> Spread | None:
        """Median, least and largest; None when no round has one."""
        return Spread.of(self.ratios) if self.ratios else None


def measure(
    first: System,
    second: System,
    works: Sequence[Work],
    rounds: int,
    *,
    tell: Callable[[str], None] = lambda text: None,
    pause: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Each work for one round to warm up and `rounds` that count; in each the first system, then the second."""
    rows: list[Row] = []
    for work in works:
        pairs: list[tuple[Sequence[float], Sequence[float]]] = []
        for round_ in range(rounds + 1):
            tell(f"{work.rows[0][0]}, round {round_} of {rounds}")
            pairs.append((work.run(first), work.run(second)))
        rows += [_row(title, unit, [(a[i], b[i]) for a, b in pairs[1:]]) for i, (title, unit) in enumerate(work.rows)]
        pause(PAUSE_S)
    return rows


def _row(title: str, unit: Unit, pairs: Sequence[tuple[float, float]]) -> Row:
    ratios = [a / b if unit == "tok/s" else b / a for a, b in pairs if a > 0 and b > 0]
    return Row(title, unit, Spread.of([a for a, _ in pairs]), Spread.of([b for _, b in pairs]), ratios)
