"""How many prompt tokens a step may carry, so that the streams it also serves do not stall."""

from __future__ import annotations

import math

from miro_cy.sched.config import SchedulerConfig

#: A step always carries this many prompt tokens, whatever it costs: prompts progress under any decode load.
MIN_CHUNK = 16
#: Prompt tokens in a step before anything has been measured.
FIRST_CHUNK = 32
#: With no stream to stall a step may take this many times step_ms: bigger chunks reuse each weight more often, and a
#: cancelled or newly arrived request still waits for a fraction of a second only.
IDLE_FACTOR = 4.0
#: Weight of the newest measurement.
ALPHA = 0.5


class StepBudget:
    """A moving average of what a prompt token adds to a step, beside that of a step without any.

    Every step costs one pass over the weights, so a small chunk looks dear a token; the chunk that fills the target
    is still the fixed point, since each measurement corrects the estimate at the size last used.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_tokens = config.max_step_tokens
        self._target = config.step_ms / 1000.0
        self._decode_step: float | None = None  # seconds of a step that only decodes
        self._prompt_token: float | None = None  # seconds that a prompt token adds
        self.min_tokens = min(MIN_CHUNK, config.max_step_tokens)

    def prompt_tokens(self, n_decode: int) -> int:
        """Prompt tokens for a step that has n_decode decode rows; at least min_tokens."""
        room = self._max_tokens - n_decode
        if self._prompt_token is None:
            fits = FIRST_CHUNK
        else:
            target = self._target - (self._decode_step or 0.0) if n_decode else self._target * IDLE_FACTOR
            # A step timed as nothing says that anything fits.
            fits = int(min(max(target, 0.0) / self._prompt_token, room)) if self._prompt_token > 0.0 else room
        return max(min(room, fits), self.min_tokens)

    def observe(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """Take in the measured time of a step. Raises ValueError when it is no duration."""
        if not (math.isfinite(seconds) and seconds >= 0.0):
            raise ValueError(f"a step cannot take {seconds} seconds")
        if n_prompt == 0:
            self._decode_step = _average(self._decode_step, seconds)
        elif n_prompt >= self.min_tokens:  # a shorter run measures little but the pass over the weights
            base = (self._decode_step or 0.0) if n_decode else 0.0
            self._prompt_token = _average(self._prompt_token, max(seconds - base, 0.0) / n_prompt)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + ALPHA * (new - old)
