"""The sampler beside its NumPy twin: draws, filters, ties, distribution, log-probabilities, non-finite rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy import SamplingParams
from miro_cy._kernels import reference
from miro_cy.sampling.sampler import TokenSampler, log_softmax_rows, top_logprobs, uniform_at

SMALL_NUDGE = 2e-5  # relative rounding of float32 exponentials beside float64


def make_row(seed, n, decimals=None):
    x = (np.random.default_rng(seed).standard_normal((1, n)) * 3).astype(np.float32)
    return x if decimals is None else x.round(decimals)


def pick(row, position=0, choice=0, **params):
    return TokenSampler(SamplingParams(**params), choice).pick(np.atleast_2d(row), 0, position)


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 2**31 - 1), position=st.integers(0, 2**31 - 1))
def test_uniform_is_philox(seed, choice, position):
    u = uniform_at(seed, choice, position)
    assert u == reference.uniform(seed, choice, position)
    assert 0 < u < 1


def test_uniform_changes_with_every_part_of_its_key():
    base = (7, 3, 11)
    others = [(8, 3, 11), (7 + 2**32, 3, 11), (7, 4, 11), (7, 3, 12), (7, 11, 3)]
    assert len({uniform_at(*key) for key in [base, *others]}) == 6


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    n=st.one_of(st.integers(1, 60), st.integers(1000, 9000)),
    temperature=st.sampled_from([0.01, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    position=st.integers(0, 5000),
)
def test_pick_equals_reference(seed, n, temperature, top_k, top_p, position):
    row = make_row(seed, n, 1 if seed % 2 else None)[0]
    got = pick(row, position, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    u = reference.uniform(seed, 0, position)
    if got == reference.sample(row, temperature, top_k, top_p, u):
        return
    # u, or the edge of the nucleus, fell within rounding of a boundary: a neighbour in the order of drawing is right
    unfiltered = not 0 < top_k < n and top_p == 1
    order = list(range(n)) if unfiltered else reference.top_k(row, n)
    nudged = [
        reference.sample(row, temperature, top_k, min(1.0, top_p * (1 + a)), min(1.0, max(0.0, u + b)))
        for a in (-SMALL_NUDGE, SMALL_NUDGE)
        for b in (-SMALL_NUDGE, SMALL_NUDGE)
    ]
    ranks = [order.index(token) for token in nudged]
    assert min(ranks) <= order.index(got) <= max(ranks)


@given(seed=st.integers(0, 2**31), n=st.integers(1, 5000), position=st.integers(0, 100))
def test_top_k_of_one_equals_temperature_zero(seed, n, position):
    row = make_row(seed, n, 0)
    greedy = pick(row, position, temperature=0)
    assert greedy == int(np.argmax(row))
    assert pick(row, position, temperature=1.7, top_k=1, seed=seed) == greedy
    assert pick(row, position, temperature=1.7, top_p=1e-9, seed=seed) == greedy
    assert pick(row, position, temperature=0, top_k=5, top_p=0.5, seed=seed) == greedy


def test_ties_go_to_the_lowest_ids():
    row = np.zeros(50, np.float32)
    row[[7, 20, 33]] = 2.0
    assert pick(row, temperature=0) == 7
    drawn = {pick(row, p, temperature=1, top_k=2, seed=3) for p in range(200)}
    assert drawn == {7, 20}
    equal = np.zeros(50, np.float32)
    assert {pick(equal, p, temperature=1, top_k=3, seed=3) for p in range(300)} == {0, 1, 2}
    # four of fifty equal candidates reach 8 % of the probability
    assert {pick(equal, p, temperature=1, top_p=0.0799, seed=3) for p in range(300)} == {0, 1, 2, 3}


def test_top_p_is_measured_within_top_k():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # of the best two, 4/7 and 3/7, the first alone reaches 0.5; of all four it does not
    assert {pick(row, p, temperature=1, top_k=2, top_p=0.5, seed=1) for p in range(200)} == {0}
    assert {pick(row, p, temperature=1, top_p=0.5, seed=1) for p in range(200)} == {0, 1}


def test_a_nucleus_wider_than_the_first_shortlist():
    row = np.zeros(3000, np.float32)
    drawn = {pick(row, p, temperature=1, top_p=0.4999, seed=5) for p in range(4000)}
    assert max(drawn) < 1500
    assert len(drawn) > 1300
    row[2999] = 20.0
    assert {pick(row, p, temperature=1, top_p=0.9, seed=5) for p in range(50)} == {2999}


@pytest.mark.parametrize("key", ["position", "seed", "choice"])
@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 12, "top_p": 0.9}],
    ids=str,
)
def test_draws_follow_the_distribution(key, filters):
    row = make_row(4, 16)
    count = 20_000
    params = {"temperature": 1.0, "seed": 99, **filters}
    if key == "position":
        sampler = TokenSampler(SamplingParams(**params))
        drawn = [sampler.pick(row, 0, position) for position in range(count)]
    elif key == "seed":
        drawn = [TokenSampler(SamplingParams(**{**params, "seed": s})).pick(row, 0, 5) for s in range(count)]
    else:
        drawn = [TokenSampler(SamplingParams(**params), choice).pick(row, 0, 5) for choice in range(count)]
    expected = expected_distribution(row[0], **filters)
    seen = np.bincount(drawn, minlength=row.shape[1])
    assert seen[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((seen[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum())
    assert chi_square < chi_square_limit(int(kept.sum()) - 1)


def expected_distribution(row, temperature=1.0, top_k=0, top_p=1.0):
    p = np.exp(row.astype(np.float64) / temperature)
    order = np.argsort(-p, kind="stable")
    p[order[top_k or len(p) :]] = 0
    p /= p.sum()
    p[order[1 + int(np.searchsorted(np.cumsum(p[order]), top_p)) :]] = 0
    return p / p.sum()


def chi_square_limit(df):
    """What one in a hundred thousand draws exceeds (Wilson and Hilferty, 1931)."""
    return df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3


def test_draws_do_not_depend_on_other_rows():
    rows = np.vstack([make_row(s, 300) for s in range(5)])
    sampler = TokenSampler(SamplingParams(temperature=0.8, top_p=0.9, seed=3))
    assert [sampler.pick(rows, i, 40) for i in range(5)] == [
        sampler.pick(rows[i : i + 1].copy(), 0, 40) for i in range(5)
    ]


@pytest.mark.parametrize("filters", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_rows_give_no_token(filters, bad):
    for n in (1, 17, 5000):
        for at in {0, n // 2, n - 1}:
            row = make_row(1, n)
            row[0, at] = bad
            assert pick(row, seed=1, **filters) == -1
        assert pick(np.full(n, -np.inf, np.float32), seed=1, **filters) == -1


@pytest.mark.parametrize("filters", [{"temperature": 0}, {}, {"top_k": 6}, {"top_p": 0.999}], ids=str)
def test_impossible_tokens_are_never_drawn(filters):
    row = np.full(40, -np.inf, np.float32)
    row[[3, 30]] = 0.0
    assert {pick(row, p, seed=2, **filters) for p in range(100)} <= {3, 30}


@given(seed=st.integers(0, 2**31), n=st.one_of(st.integers(1, 60), st.integers(4000, 9000)), k=st.integers(0, 20))
def test_logprobs_are_the_raw_log_softmax(seed, n, k):
    row = make_row(seed, n, 1)
    sampler = TokenSampler(SamplingParams(temperature=0.3, top_k=2, top_p=0.4, logprobs=k, seed=1))
    whole = row.copy()
    log_softmax_rows(whole)
    np.testing.assert_allclose(whole[0], reference.log_softmax(row[0]), rtol=1e-6, atol=4e-6)
    token = seed % n
    logprob, top = sampler.logprob(row, 0, token)
    assert logprob == whole[0, token]
    assert top == [(i, float(whole[0, i])) for i in reference.top_k(row[0], min(k, n))]


def test_logprobs_of_impossible_tokens():
    row = np.array([[0.0, -np.inf, 1.0]], np.float32)
    logprob, top = TokenSampler(SamplingParams(logprobs=3)).logprob(row, 0, 1)
    assert logprob == -math.inf
    assert [i for i, _ in top] == [2, 0, 1]
    assert top[2][1] == -math.inf


@given(seed=st.integers(0, 2**31), n=st.one_of(st.integers(1, 60), st.integers(4000, 9000)), k=st.integers(0, 90))
def test_the_best_of_a_row_are_those_of_its_logprobs(seed, n, k):
    rows = np.vstack([make_row(seed + i, n, 1) for i in range(3)])
    sampler = TokenSampler(SamplingParams(temperature=0, logprobs=k))
    for i in range(3):
        best = top_logprobs(rows, i, k)
        assert best == sampler.logprob(rows, i, 0)[1]
        assert best == top_logprobs(rows[i : i + 1].copy(), 0, k)
        assert len(best) == min(k, n)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_best(bad):
    row = make_row(1, 100)
    row[0, 50] = bad
    assert top_logprobs(row, 0, 5) is None
    assert top_logprobs(np.full((1, 9), -np.inf, np.float32), 0, 5) is None
    assert top_logprobs(np.array([[-np.inf, 0.0]], np.float32), 0, 5) == [(1, 0.0), (0, -math.inf)]
