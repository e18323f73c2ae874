"""The probes of the machine's limits do the work that they are timed for: their results are their twins'."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miro_cy._kernels import probe, reference, select

property_test = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@property_test
@given(seed=st.integers(0, 2**32), units=st.integers(1, 40), threads=st.integers(1, 5))
def test_read_sees_every_word_once(seed, units, threads):
    buffer = np.random.default_rng(seed).integers(0, 256, units * probe.READ_UNIT).astype(np.uint8)
    words, rate = probe.read(buffer, threads)
    assert words == reference.probe_read(buffer)
    assert math.isfinite(rate)
    assert rate > 0


def test_read_goes_through_all_pieces():
    size = (32 << 20) + 3 * probe.READ_UNIT
    buffer = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    assert probe.read(buffer, 2)[0] == reference.probe_read(buffer)
    probe.fill(buffer, 7, 2)
    assert (buffer == 7).all()


@property_test
@given(units=st.integers(1, 40), threads=st.integers(1, 5), value=st.integers(0, 255))
def test_fill_sets_every_byte(units, threads, value):
    buffer = np.arange(units * probe.READ_UNIT).astype(np.uint8)
    probe.fill(buffer, value, threads)
    assert (buffer == value).all()


@property_test
@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 6), pieces=st.integers(1, 2), threads=st.integers(1, 3))
def test_fma(seed, rounds, pieces, threads):
    x = np.random.default_rng(seed).integers(-8, 9, 192).astype(np.float32)
    got, rate = probe.fma(x, 0.5, 1.0, rounds, pieces, threads)
    assert 1 <= got.shape[0] <= threads
    assert (got == reference.probe_fma(x, 0.5, 1.0, rounds * pieces)[: got.shape[1]]).all()
    assert math.isfinite(rate)
    assert rate > 0


@property_test
@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 5), pieces=st.integers(1, 2), threads=st.integers(1, 3))
def test_dot(seed, rounds, pieces, threads):
    rng = np.random.default_rng(seed)
    w, x = rng.integers(0, 16, 4096).astype(np.uint8), rng.integers(-127, 128, 32).astype(np.int8)
    got, rate = probe.dot(w, x, rounds, pieces, threads)
    team, rows, lanes = got.shape
    assert 1 <= team <= threads
    assert (got == reference.probe_dot(w, x, rows, lanes, rounds)).all()
    assert math.isfinite(rate)
    assert rate > 0


def test_dot_does_not_overflow():
    w, x = np.full(4096, 15, np.uint8), np.full(32, 127, np.int8)
    assert (probe.dot(w, x, probe.MAX_DOT_ROUNDS)[0] == probe.MAX_DOT_ROUNDS * 32 * 4 * 15 * 127).all()


@pytest.mark.skipif(select.TILES not in select.available(), reason="this machine has no tile registers")
def test_tile():
    """Small integers, so that every sum is exact: three of the four products go to sums of their own."""
    rng = np.random.default_rng(3)
    x, w = rng.integers(-4, 5, (16, 32)), rng.integers(-4, 5, (32, 16))
    pairs = w.reshape(16, 2, 16).swapaxes(1, 2)  # [pair][output][2]
    floats = [np.ascontiguousarray(a, np.float32) for a in (x, pairs)]
    tiles = [(a.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1) for a in floats]
    got, rate = probe.tile(*tiles, 5, 2, 2)
    assert (got == 5 * (x @ w)).all()
    assert math.isfinite(rate)
    assert rate > 0
    for bad in ((tiles[0][:1023], tiles[1], 1), (*tiles, 0), (*tiles, 1, 0), (*tiles, 1, 1, 0)):
        with pytest.raises(ValueError, match="must"):
            probe.tile(*bad)


def test_what_does_not_fit_is_refused():
    floats, w, x = np.zeros(192, np.float32), np.zeros(4096, np.uint8), np.zeros(32, np.int8)
    for call in (
        lambda: probe.read(w[:500]),
        lambda: probe.read(w[:0]),
        lambda: probe.read(w, 0),
        lambda: probe.fill(w[:0], 0),
        lambda: probe.fma(floats[:191], 1.0, 1.0, 1),
        lambda: probe.fma(floats, 1.0, 1.0, 0),
        lambda: probe.fma(floats, 1.0, 1.0, 1, 0),
        lambda: probe.dot(w[:4095], x, 1),
        lambda: probe.dot(w, x[:31], 1),
        lambda: probe.dot(w, x, 0),
        lambda: probe.dot(w, x, probe.MAX_DOT_ROUNDS + 1),
        lambda: probe.dot(w, x, 1, 0),
    ):
        with pytest.raises(ValueError, match=r"must|needs|multiple"):
            call()
