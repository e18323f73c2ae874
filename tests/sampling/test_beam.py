"""Beam search as a state machine, beside a dense NumPy twin and beside the enumeration of everything possible."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miro_cy.sampling.beam import BeamSearch, Hypothesis

EARLY = [True, False, "never"]
PENALTIES = [-2.0, -0.5, 0.0, 0.6, 1.0, 2.0]


class Language:
    """Log-probabilities after every prefix, float32 [vocab], by the prefix alone. coarse: few values, so many ties."""

    def __init__(self, seed, vocab, coarse=False, impossible=0.0):
        self.seed, self.vocab, self.coarse, self.impossible = seed, vocab, coarse, impossible

    def __call__(self, prefix):
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        if self.coarse:
            row = -0.25 * rng.integers(1, 5, self.vocab)
        else:
            row = rng.standard_normal(self.vocab) * 2
            row -= np.log(np.exp(row).sum())
        row[rng.random(self.vocab) < self.impossible] = -np.inf
        return row.astype(np.float32)

    def best(self, prefix, count):
        row = self(prefix)
        return [(int(i), float(row[i])) for i in np.argsort(-row, kind="stable")[:count]]


def run(language, search):
    """Drive a search to its end; returns its hypotheses."""
    prefixes = [()]
    while not search.done:
        assert search.n_live == len(prefixes)
        moves = search.advance([language.best(prefix, search.row_size) for prefix in prefixes])
        prefixes = [(*prefixes[at], token) for at, token in moves]
        assert prefixes == [tuple(search.tokens(at)) for at in range(search.n_live)]
        assert len(set(prefixes)) == len(prefixes)
    assert search.n_live == len(prefixes) == 0
    return search.hypotheses()


def twin(language, width, max_tokens, stops, penalty, early):
    """(tokens, score) of the hypotheses, best first, from whole [live, vocab] grids of sums."""
    prefixes, sums, found = [()], np.zeros(1), []
    for length in range(1, max_tokens + 1):
        grid = (sums[:, None] + np.stack([language(prefix) for prefix in prefixes]).astype(np.float64)).ravel()
        order = np.argsort(-grid, kind="stable")[: max(2, 1 + len(stops)) * width]
        order = order[grid[order] > -np.inf]
        words = [(*prefixes[i // language.vocab], int(i % language.vocab)) for i in order]
        stopped = np.array([word[-1] in stops for word in words], bool)
        ended = stopped | (length == max_tokens)
        for i in np.flatnonzero(ended[:width]):
            found.append((words[i], grid[order[i]] / length**penalty))
        found = sorted(found, key=lambda item: -item[1])[:width]
        going = np.flatnonzero(~ended)[:width]
        prefixes, sums = [words[i] for i in going], grid[order[going]]
        if not prefixes:
            break
        if len(found) == width:
            reach = max_tokens if early == "never" and penalty > 0 else length
            if early is True or sums[0] / reach**penalty <= found[-1][1]:
                break
    return found


@settings(max_examples=1000)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 9),
    coarse=st.booleans(),
    impossible=st.sampled_from([0.0, 0.0, 0.3]),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 9),
    stops=st.sets(st.integers(0, 5), max_size=3),
    penalty=st.sampled_from(PENALTIES),
    early=st.sampled_from(EARLY),
)
def test_the_hypotheses_are_those_of_the_twin(
    seed, vocab, coarse, impossible, width, max_tokens, stops, penalty, early
):
    language = Language(seed, vocab, coarse, impossible)
    search = BeamSearch(width, max_tokens, stops, length_penalty=penalty, early_stopping=early)
    got = run(language, search)
    assert [(item.tokens, item.score) for item in got] == twin(language, width, max_tokens, stops, penalty, early)
    for item in got:
        assert item.finish_reason == ("stop" if item.tokens[-1] in stops else "length")
        assert item.finish_reason == "stop" or len(item.tokens) == max_tokens
        assert not set(item.tokens[:-1]) & stops


@given(seed=st.integers(0, 2**31), penalty=st.sampled_from([0.6, 1.0, 2.0]), stops=st.sets(st.integers(0, 2)))
def test_a_search_wide_enough_finds_the_best_of_all(seed, penalty, stops):
    language, longest = Language(seed, 3), 4
    complete = []
    for length in range(1, longest + 1):
        for word in itertools.product(range(3), repeat=length):
            if not set(word[:-1]) & stops and (length == longest or word[-1] in stops):
                total = sum(float(language(word[:i])[word[i]]) for i in range(length))
                complete.append((word, total / length**penalty))
    complete.sort(key=lambda item: -item[1])
    search = BeamSearch(3**longest, longest, stops, length_penalty=penalty, early_stopping="never")
    assert [(item.tokens, item.score) for item in run(language, search)] == complete


@given(seed=st.integers(0, 2**31), vocab=st.integers(1, 12), stops=st.sets(st.integers(0, 12), max_size=2))
def test_a_width_of_one_is_greedy(seed, vocab, stops):
    language = Language(seed, vocab)
    expected: list[int] = []
    while len(expected) < 6 and not (expected and expected[-1] in stops):
        expected.append(int(language(expected).argmax()))
    (only,) = run(language, BeamSearch(1, 6, stops, early_stopping=True))
    assert list(only.tokens) == expected


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(4, 12),
    stops=st.sets(st.integers(0, 12), max_size=4),
    early=st.sampled_from(EARLY),
)
def test_every_search_gives_its_width_of_different_hypotheses(seed, vocab, stops, early):
    got = run(Language(seed, vocab), BeamSearch(4, 5, stops, early_stopping=early))
    assert len({item.tokens for item in got}) == 4
    assert [item.score for item in got] == sorted((item.score for item in got), reverse=True)


def test_logprobs_are_those_of_the_rows_that_the_tokens_were_taken_from():
    language = Language(5, 9)
    (best, *others) = run(language, BeamSearch(3, 4, [0], n_logprobs=6))
    assert len(others) == 2
    for item in (best, *others):
        assert len(item.logprobs) == len(item.tokens)
        for at, (token, logprob) in enumerate(zip(item.tokens, item.logprobs, strict=True)):
            assert logprob.logprob == language(item.tokens[:at])[token]
            assert logprob.top == language.best(item.tokens[:at], 6)
        assert item.score == sum(logprob.logprob for logprob in item.logprobs) / len(item.tokens)
    assert [item.logprobs for item in run(language, BeamSearch(3, 4, [0]))] == [None] * 3
    assert [logprob.top for logprob in run(language, BeamSearch(3, 4, [0], n_logprobs=0))[0].logprobs] == [[]] * 4


@pytest.mark.parametrize(("stops", "n_logprobs", "size"), [((), None, 4), ([7, 8, 8], 2, 6), ([7], 128, 128)])
def test_how_many_tokens_of_a_row_it_asks_for(stops, n_logprobs, size):
    assert BeamSearch(4, 3, stops, n_logprobs=n_logprobs).row_size == size


def test_alternatives_that_are_only_reported_change_nothing():
    language = Language(11, 12, coarse=True)
    plain, reported = (run(language, BeamSearch(2, 5, [3], n_logprobs=n)) for n in (None, 12))
    assert [(item.tokens, item.score) for item in plain] == [(item.tokens, item.score) for item in reported]


def test_ties_go_to_the_better_beam_then_the_lower_token():
    search = BeamSearch(2, 2)
    assert search.advance([[(5, -1.0), (9, -1.0)]]) == [(0, 5), (0, 9)]
    assert search.advance([[(8, -1.0), (3, -1.0)], [(1, -1.0), (2, -1.0)]]) == []
    assert [item.tokens for item in search.hypotheses()] == [(5, 3), (5, 8)]


def test_a_stop_token_below_the_first_ranks_ends_nothing():
    search = BeamSearch(1, 3, [0])
    assert search.advance([[(4, -0.1), (0, -0.2)]]) == [(0, 4)]
    assert search.hypotheses() == []
    assert search.advance([[(0, -0.1), (4, -0.2)]]) == []
    assert search.hypotheses() == [Hypothesis((4, 0), -0.2 / 2, "stop", None)]


def test_never_looks_ahead_only_where_longer_is_better():
    search = BeamSearch(2, 100, [0], length_penalty=-1.0, early_stopping="never")
    search.advance([[(1, -0.1), (0, -5.0), (2, -6.0)]])
    search.advance([[(1, -0.1), (0, -4.9), (2, -9.0)], [(1, -1.0), (2, -1.0), (0, -9.0)]])
    assert len(search.hypotheses()) == 2
    # The best live beam scores -0.4 now and -20 at 100 tokens; the worst hypothesis has -10.
    assert not search.done


def test_what_is_impossible_is_no_beam():
    search = BeamSearch(3, 4)
    assert search.advance([[(1, -0.5), (2, -math.inf), (0, -math.inf)]]) == [(0, 1)]
    assert search.advance([[(2, -math.inf)]]) == []
    assert search.done
    assert search.hypotheses() == []


@given(seed=st.integers(0, 2**31), steps=st.integers(0, 5), penalty=st.sampled_from(PENALTIES))
def test_an_interrupted_search_has_what_it_would_have_if_that_were_its_longest(seed, steps, penalty):
    language = Language(seed, 7)
    search = BeamSearch(3, 9, [0], length_penalty=penalty)
    for _ in range(steps):
        if not search.done:
            search.advance([language.best(search.tokens(at), search.row_size) for at in range(search.n_live)])
    was_done = search.done
    search.interrupt()
    assert search.done
    got = [(item.tokens, item.score) for item in search.hypotheses()]
    if was_done or steps == 0:
        assert steps == 0 or len(got) == 3
        return
    shorter = run(language, BeamSearch(3, steps, [0], length_penalty=penalty))
    assert got[0] == (shorter[0].tokens, shorter[0].score)
    assert {tokens for tokens, _ in got} >= {item.tokens for item in shorter if item.finish_reason == "stop"}
    assert len(got) == 3


def test_a_long_hypothesis_needs_no_deep_stack():
    search = BeamSearch(1, 100_000)
    while not search.done:
        search.advance([[(1, -0.5)]])
    (only,) = search.hypotheses()
    assert (len(only.tokens), only.score) == (100_000, -0.5)
    del search, only


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no beam search of width 0"):
        BeamSearch(0, 5)
    with pytest.raises(ValueError, match="over 0 tokens"):
        BeamSearch(2, 0)
    search = BeamSearch(2, 2)
    with pytest.raises(ValueError, match="2 rows for 1 live beams"):
        search.advance([[(0, -1.0)], [(1, -1.0)]])
    search.advance([[(0, -1.0), (1, -1.0)]])
    search.advance([[(0, -1.0), (1, -1.0)]] * 2)
    with pytest.raises(ValueError, match="0 rows for 0 live beams"):
        search.advance([])
