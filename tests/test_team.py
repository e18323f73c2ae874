"""How threads deal work out: every item once, whoever is late, and whatever has been dealt before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy._kernels.team import deal


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    threads=st.integers(1, 5),
    most=st.sampled_from([1, 2, 7, 1000]),
    rounds=st.integers(1, 3),
)
def test_every_item_is_taken_once(sizes: list[int], threads: int, most: int, rounds: int) -> None:
    taken, largest = deal(sizes, threads, most, rounds=rounds)
    assert (taken.sum(axis=0) == rounds).all()
    assert largest.max() <= most


def test_every_item_is_taken_once_while_threads_are_many_deals_apart() -> None:
    """More threads than CPUs and nothing to meet at: one goes through many deals while another is not running."""
    for threads in (2, 3, 8):
        assert (deal([threads + 1] * 3000, threads, 1, rounds=5)[0].sum(axis=0) == 5).all()


def test_every_item_of_a_large_deal_is_taken_once() -> None:
    assert (deal([600_000] * 3, 2, 1)[0].sum(axis=0) == 1).all()


@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_others_do_what_a_late_thread_would_have_done(threads: int, most: int) -> None:
    for late in range(threads):
        taken, largest = deal([64, 1, 7], threads, most, late=late)
        if largest.min() < 0:
            pytest.skip("no team of so many threads here")
        assert (taken.sum(axis=0) == 1).all()
        assert not taken[late].any()


def test_nobody_takes_so_much_at_once_that_nothing_is_left_for_others() -> None:
    taken, largest = deal([64], 2, 1000)
    if largest.min() < 0:
        pytest.skip("no team of two threads here")
    assert (taken.sum(axis=0) == 1).all()
    assert largest.max() <= 8  # a quarter of a run
    assert deal([64], 1, 1000)[1].tolist() == [64]


def test_limits_are_refused() -> None:
    for call in (
        lambda: deal([], 1, 1),
        lambda: deal([-1], 1, 1),
        lambda: deal([1 << 24], 1, 1),
        lambda: deal([1], 0, 1),
        lambda: deal([1], 1, 0),
        lambda: deal([1], 2, 1, late=2),
        lambda: deal([1], 1, 1, rounds=0),
    ):
        with pytest.raises(ValueError, match=r"deal|must be"):
            call()
