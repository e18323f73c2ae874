"""The machine's limits: figures that come from the clock and the work, and are finite on a real one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from miro_cy._kernels import select
from miro_cy.tools import limits
from miro_cy.tools.limits import LimitProbe


@pytest.fixture(params=select.available())
def isa(request: pytest.FixtureRequest) -> Any:
    before = select.active_isa()
    select.use(request.param)
    yield request.param
    select.use(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 2])
def test_real_figures_are_positive_and_finite(threads: int, small_buffer: int) -> None:
    best = LimitProbe(threads).best
    figures = (best.read_gb_per_s, best.fma_gflops, best.int8_gflops)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert best.read_bytes == small_buffer


def test_the_best_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([2e9, 1e9, 3e9])
    probes = {name: (lambda *_: (None, next(rates))) for name in ("read", "fma", "dot")}
    measured = LimitProbe(1)
    for name, fake in probes.items():
        monkeypatch.setattr(limits.probe, name, fake)
    assert (measured.best.read_gb_per_s, measured.best.fma_gflops, measured.best.int8_gflops) == (2.0, 1.0, 3.0)
    rates = iter([1e9, 4e9, 3e9])
    measured.measure()
    assert (measured.best.read_gb_per_s, measured.best.fma_gflops, measured.best.int8_gflops) == (2.0, 4.0, 3.0)


def test_the_buffer_is_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 100_000)
    assert LimitProbe(1).best.read_bytes == 25_000 // 512 * 512
    monkeypatch.setattr(limits, "available_memory", lambda: 0)
    assert LimitProbe(2).best.read_bytes == 2 * 512
