"""How many prompt tokens a step may carry, so that the streams it also serves do not stall."""

from __future__ import annotations

import math

from miro_cy.sched.config import SchedulerConfig
from miro_cy.sched.cost import LinearCost

#: A step always carries this many prompt tokens, whatever it costs: prompts progress under any decode load.
MIN_CHUNK = 16
#: Prompt tokens in a step, and keys that they attend to, before any were measured. From then on at most twice as many
#: tokens and four times as many keys (of twice the tokens at twice the depth) as ever: more would be a guess.
FIRST_CHUNK = 32
FIRST_KEYS = 65_536
#: With no stream to stall a step may take this many times step_ms: bigger chunks reuse each weight more often, and a
#: cancelled or newly arrived request still waits for a fraction of a second only.
IDLE_FACTOR = 4.0


class StepBudget:
    """The seconds of a step, given out chunk by chunk.

    A step costs a pass over the weights, something for each decode row and each key that one attends to, and beside
    that something for each prompt token and each key (query-key pair) of those. The first part is fitted to steps
    without a real chunk alone, the second to what the others took beyond it. Together they could not be told apart:
    steps that all take step_ms, as they should, look as if nothing but the pass over the weights cost anything.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_tokens = config.max_step_tokens
        self._target = config.step_ms / 1000.0
        self.min_tokens = min(MIN_CHUNK, config.max_step_tokens)
        self._base = LinearCost((1.0, 8.0, 4000.0))  # a step, a decode row, a key of one
        self._chunks = LinearCost((64.0, 16_000.0, 8.0))  # a prompt token, a key of one; a row, if unknown else
        self._most_tokens = FIRST_CHUNK // 2
        self._most_keys = FIRST_KEYS // 4
        self._left = 0.0
        self._room = self._used = 0
        self._keys_used = 0

    def begin(self, n_decode: int, decode_keys: int) -> None:
        """A new step with so many decode rows, which attend to so many keys in all."""
        target = self._target if n_decode else self._target * IDLE_FACTOR
        rows = (1.0, n_decode, decode_keys)
        self._left = target - self._base.predict(rows) - self._chunks.predict((0.0, 0.0, n_decode))
        self._room = max(min(self._max_tokens - n_decode, 2 * self._most_tokens), self.min_tokens)
        self._used = self._keys_used = 0

    @property
    def spent(self) -> bool:
        """Whether the step takes no further prompt token."""
        return self._used >= self._room or (self._used >= self.min_tokens and self._left <= 0.0)

    def fit(self, first: int, wanted: int) -> int:
        """How many of the next `wanted` tokens of a prompt, from position `first`, the step still takes."""
        token, key, _ = self._chunks.coefficients()
        limit = min(wanted, self._room - self._used)
        least = min(limit, max(0, self.min_tokens - self._used))
        fits = _most(token + key * (first + 0.5), 0.5 * key, self._left)
        fits = min(fits, _most(first + 0.5, 0.5, 4 * self._most_keys - self._keys_used))
        return int(max(least, min(limit, fits)))

    def take(self, first: int, n: int) -> None:
        """The step carries n tokens of a prompt from position `first`."""
        self._used += n
        self._keys_used += keys_of(first, n)
        self._left -= self._chunks.predict((n, keys_of(first, n), 0.0))

    def observe(self, n_decode: int, decode_keys: int, n_prompt: int, prompt_keys: int, seconds: float) -> None:
        """Take in the measured time of a step. Raises ValueError when it is no duration."""
        if not (math.isfinite(seconds) and seconds >= 0.0):
            raise ValueError(f"a step cannot take {seconds} seconds")
        if n_prompt < self.min_tokens:  # so few tokens cost what as many decode rows do
            self._base.observe((1.0, n_decode + n_prompt, decode_keys + prompt_keys), seconds)
            return
        beyond = max(seconds - self._base.predict((1.0, n_decode, decode_keys)), 0.1 * seconds)
        self._chunks.observe((n_prompt, prompt_keys, n_decode), beyond)
        self._most_tokens = max(self._most_tokens, n_prompt)
        self._most_keys = max(self._most_keys, prompt_keys)


def keys_of(first: int, n: int) -> int:
    """Keys that n tokens from position `first` attend to, over all of them."""
    return n * first + n * (n + 1) // 2


def _most(a: float, b: float, limit: float) -> float:
    """The largest n >= 0 with a * n + b * n * n <= limit, for a, b >= 0."""
    if limit <= 0.0:
        return 0.0
    if a <= 0.0 and b <= 0.0:
        return math.inf
    # The form that loses no digits when b is small.
    return 2.0 * limit / (a + math.sqrt(a * a + 4.0 * b * limit))
