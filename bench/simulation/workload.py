"""Requests: when each arrives, who sends it, how long prompt and answer are. All of it follows from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["poisson", "bursty"]
Lengths = Literal["lognormal", "pareto"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Bursty arrivals come from two states in turn. Rate and mean stay of each, in units of the mean time between arrivals:
#: bursts of 60 requests, 40 between them, 100 in 100 units.
BURST = (3.0, 20.0)
QUIET = (0.5, 80.0)
#: Share of requests of the higher priority.
URGENT = 0.1
#: An answer's max_tokens is its length times something between 1 and this: clients allow more than they get.
ALLOWANCE = 4.0
#: Tail index of Pareto lengths: a mean, but no variance (before they are cut off).
PARETO_TAIL = 1.6
#: Ids that begin prompts, each of its own, are from here on; others are below.
FIRST_ID = 1 << 20
POOL_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class Range:
    """A heavy-tailed length: its median, the sigma of its logarithm where that is normal, and its limits."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, kind: Lengths, n: int) -> Ints:
        """n lengths. What falls outside the limits is drawn again: lengths piled up at a limit would be no tail."""
        drawn = np.zeros(n, np.int64)
        left = np.arange(n)
        while len(left):
            drawn[left] = np.rint(self._raw(rng, kind, len(left)))
            left = left[(drawn[left] < self.low) | (drawn[left] > self.high)]
        return drawn

    def _raw(self, rng: np.random.Generator, kind: Lengths, n: int) -> Floats:
        if kind == "lognormal":
            return self.median * np.exp(self.sigma * rng.standard_normal(n))
        return self.median * 2 ** (-1 / PARETO_TAIL) * (1 + rng.pareto(PARETO_TAIL, n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A workload but for its rate. clients: who send, the k-th of them in proportion to 1/k. shared: share of requests
    whose prompt begins with one of `prefixes` common beginnings of `prefix_tokens` tokens.
    """

    requests: int = 2000
    clients: int = 100
    arrivals: Arrivals = "poisson"
    lengths: Lengths = "lognormal"
    prompt: Range = field(default=Range(160, 1.0, 4, 2048))
    answer: Range = field(default=Range(100, 0.8, 1, 1024))
    shared: float = 0.0
    prefixes: int = 8
    prefix_tokens: int = 256
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens that a sequence may come to have."""
        return self.prompt.high + self.answer.high + (self.prefix_tokens if self.shared else 0)


@dataclass(slots=True)
class Workload:
    """One entry a request, in order of arrival. arrival: seconds; answer: tokens it generates until it ends; allowed:
    its max_tokens; prefix: which beginning it shares, -1 for none.
    """

    shape: Shape
    arrival: Floats
    n_prompt: Ints
    answer: Ints
    allowed: Ints
    client: Ints
    priority: Ints
    prefix: Ints
    _own: Ints  # where in _pool its own tokens are
    _pool: NDArray[np.int32]
    _beginnings: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.arrival)

    def prompt(self, i: int) -> NDArray[np.int32]:
        """Token ids of a request's prompt, int32. Beyond the shared beginning no two are alike."""
        shared = self.shape.prefix_tokens if self.prefix[i] >= 0 else 0
        tokens = np.empty(self.n_prompt[i], np.int32)
        if shared:
            tokens[:shared] = self._beginnings[self.prefix[i]]
        n = len(tokens) - shared
        tokens[shared:] = self._pool[self._own[i] : self._own[i] + n]
        tokens[shared] = FIRST_ID + i
        return tokens


def make_workload(shape: Shape, rate: float) -> Workload:
    """The workload of that shape and seed, at so many requests a second; at an infinite rate all are there at 0."""
    rng = np.random.default_rng(shape.seed)
    n = shape.requests
    arrival = _arrivals(rng, shape.arrivals, n) / rate
    weight = 1.0 / np.arange(1, shape.clients + 1)
    client = rng.choice(shape.clients, n, p=weight / weight.sum())
    prefix = np.where(rng.random(n) < shape.shared, rng.integers(0, shape.prefixes, n), -1)
    answer = shape.answer.draw(rng, shape.lengths, n)
    allowed = np.minimum(np.ceil(answer * rng.uniform(1.0, ALLOWANCE, n)), shape.answer.high).astype(np.int64)
    return Workload(
        shape=shape,
        arrival=arrival,
        n_prompt=shape.prompt.draw(rng, shape.lengths, n) + np.where(prefix >= 0, shape.prefix_tokens, 0),
        answer=answer,
        allowed=allowed,
        client=client,
        priority=(rng.random(n) < URGENT).astype(np.int64),
        prefix=prefix,
        _own=rng.integers(0, POOL_TOKENS, n),
        _pool=rng.integers(0, FIRST_ID, POOL_TOKENS + shape.prompt.high, np.int32),
        _beginnings=rng.integers(0, FIRST_ID, (shape.prefixes, shape.prefix_tokens), np.int32),
    )


def _arrivals(rng: np.random.Generator, kind: Arrivals, n: int) -> Floats:
    """n times in units of the mean time between two."""
    if kind == "poisson":
        return np.cumsum(rng.exponential(1.0, n))
    times: list[Floats] = []
    start, found = 0.0, 0
    while found < n:
        for rate, stay in (QUIET, BURST):
            length = rng.exponential(stay)
            times.append(start + np.sort(rng.uniform(0.0, length, rng.poisson(rate * length))))
            start += length
            found += len(times[-1])
    return np.concatenate(times)[:n]
