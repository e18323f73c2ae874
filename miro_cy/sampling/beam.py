"""Beam search: which continuations of a prompt live on after each token, and which ones come out, best first.

A state machine without a model: whoever drives it gives each live beam's most likely next tokens and is told whom the
next live beams continue. It follows `generate` of Hugging Face transformers (version 5, its `_beam_search`) and
gives the same hypotheses. Dividing a sum of log-probabilities by a power of the length comes from Wu et al. 2016,
section 7, in the simpler form used there.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from miro_client.results import TokenLogprob

#: A live beam's most likely next tokens, best first: (token id, natural-log probability).
Row = Sequence[tuple[int, float]]
#: How a next live beam comes about: (index of the live beam that it continues, the token that it appends).
Move = tuple[int, int]
EarlyStopping = bool | Literal["never"]


@dataclass(slots=True, eq=False)
class _Beam:
    """A token and what led to it. Beams share their past: it is a tree, not `width` lists."""

    parent: _Beam | None
    token: int
    logprob: float
    top: Row  # of the row that the token was taken from
    total: float  # sum of the log-probabilities up to here


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation. `tokens` includes the stop token that ended it.

    score: sum of the log-probabilities / len(tokens) ** length_penalty, the stop token counted in both.
    logprobs: one a token, with the n_logprobs most likely tokens beside it; None when they are not wanted.
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: Literal["stop", "length"]
    logprobs: list[TokenLogprob] | None


class BeamSearch:
    """The live beams and the best hypotheses so far of one search; deterministic, ties included.

    width: live beams and hypotheses at most. max_tokens: longest hypothesis, stop token included, at least 1.
    stop_ids: tokens that end a hypothesis. length_penalty: above 0 favours long hypotheses, below 0 short ones.
    early_stopping: with `width` hypotheses, True ends the search at once; False ends it when the best live beam, ended
    now, would not beat the worst of them; "never" when it would not either at its best possible length (max_tokens
    if length_penalty > 0). n_logprobs: alternatives to report with each token, None for no log-probabilities.

    Of equal sums the better parent's comes first, then the lower token id; of equal scores the one found earlier.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        n_logprobs: int | None = None,
    ) -> None:
        if width < 1 or max_tokens < 1:
            raise ValueError(f"no beam search of width {width} over {max_tokens} tokens")
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._n_logprobs = n_logprobs
        self._live: list[_Beam | None] = [None]  # best first; None is the prompt, before the first token
        self._length = 0  # tokens of every live beam
        self._finished: list[tuple[float, _Beam]] = []  # (score, its last token), best first
        self._done = False

    @property
    def row_size(self) -> int:
        """Most likely tokens of a row that can matter: `width` of them go on even if all stop tokens are likelier.

        Where alternatives are to be reported, at least as many.
        """
        return max(self._width + len(self._stop_ids), self._n_logprobs or 0)

    @property
    def n_live(self) -> int:
        """Rows that the next `advance` takes: 1 before the first token, 0 when the search is over."""
        return len(self._live)

    @property
    def done(self) -> bool:
        """Whether the search is over."""
        return self._done

    def advance(self, rows: Sequence[Row]) -> list[Move]:
        """Take one token further; returns the next live beams, best first, and none when the search is over.

        rows: for each live beam, in order, its `row_size` most likely tokens (all, if the vocabulary has fewer).
        Impossible ones (-inf) are skipped. Raises ValueError when there are not `n_live` rows, or none are wanted.
        """
        if self._done or len(rows) != len(self._live):
            raise ValueError(f"{len(rows)} rows for {len(self._live)} live beams")
        self._length += 1
        is_last = self._length == self._max_tokens
        live: list[_Beam | None] = []
        moves: list[Move] = []
        for rank, (cost, at, token, logprob) in enumerate(self._ranked(rows)):
            is_stop = token in self._stop_ids
            if rank >= self._width and len(live) == self._width:
                break
            beam = _Beam(self._live[at], token, logprob, rows[at], -cost)
            # A stop token further down ends nothing: `width` likelier continuations are there.
            if rank < self._width and (is_stop or is_last):
                self._keep(beam)
            elif not is_stop and len(live) < self._width:
                live.append(beam)
                moves.append((at, token))
        self._done = is_last or not live or self._is_settled(live[0])
        self._live = [] if self._done else live
        return [] if self._done else moves

    def interrupt(self) -> None:
        """End the search here: live beams become hypotheses as they are, where they are better than those found."""
        for beam in self._live:
            if beam is not None:
                self._keep(beam)
        self._live, self._done = [], True

    def tokens(self, at: int) -> list[int]:
        """What live beam `at` has generated."""
        return [node.token for node in _path(self._live[at])]

    def hypotheses(self) -> list[Hypothesis]:
        """What has been found so far, best first: `width` of them at the end, fewer if no more are possible."""
        return [self._hypothesis(score, beam) for score, beam in self._finished]

    def _ranked(self, rows: Sequence[Row]) -> list[tuple[float, int, int, float]]:
        """All candidates as (minus their sum, index of the live beam, token, log-probability), best first."""
        size = self._width + len(self._stop_ids)
        return sorted(
            (-((beam.total if beam else 0.0) + logprob), at, token, logprob)
            for at, (beam, row) in enumerate(zip(self._live, rows, strict=True))
            for token, logprob in row[:size]
            if logprob > -math.inf
        )

    def _score(self, total: float, length: int) -> float:
        return total / length**self._length_penalty

    def _keep(self, beam: _Beam) -> None:
        """Add a hypothesis, unless `width` better ones are there."""
        insort(self._finished, (self._score(beam.total, self._length), beam), key=lambda item: -item[0])
        del self._finished[self._width :]

    def _is_settled(self, best: _Beam | None) -> bool:
        """Whether the hypotheses are complete and `best`, the best live beam, is not to compete with them."""
        if best is None or len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        at_its_best = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if at_its_best else self._length
        return self._score(best.total, length) <= self._finished[-1][0]

    def _hypothesis(self, score: float, beam: _Beam) -> Hypothesis:
        path = _path(beam)
        logprobs = None
        if self._n_logprobs is not None:
            logprobs = [TokenLogprob(node.logprob, list(node.top[: self._n_logprobs])) for node in path]
        tokens = tuple(node.token for node in path)
        return Hypothesis(tokens, score, "stop" if beam.token in self._stop_ids else "length", logprobs)


def _path(beam: _Beam | None) -> list[_Beam]:
    """A beam's tokens, the first one first."""
    path = []
    while beam is not None:
        path.append(beam)
        beam = beam.parent
    path.reverse()
    return path
