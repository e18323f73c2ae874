"""Small golden models, a clock that ticks, and a small buffer to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miro_cy.tools import limits

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


class Clock:
    """Each reading is `tick` seconds after the one before."""

    def __init__(self, tick: float = 0.25) -> None:
        self.tick = tick
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def golden() -> Callable[[str], Path]:
    return lambda name: GOLDEN / name


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bandwidth is read from a buffer of this size; the arithmetic probes are short too."""
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "FMA_ROUNDS", 1 << 10)
    monkeypatch.setattr(limits, "DOT_ROUNDS", 1 << 5)
    return 1 << 20
