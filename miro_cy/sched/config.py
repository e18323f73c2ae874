"""Settings of the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miro_cy.errors import ConfigError

MAX_SEQS = 65_536
MAX_STEP_TOKENS = 1 << 20
MAX_WAITING = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and targets of a step.

    max_num_seqs: most sequences that run (hold KV blocks) at once.
    max_step_tokens: most tokens in a step. Decode rows go even beyond it, and so does a minimal prompt chunk.
    step_ms: how long a step that carries decode rows should take, in milliseconds; prompt chunks are cut to fit.
    max_waiting: most sequences that may wait; beyond it new ones are refused.
    max_score_tokens: most logits rows a step computes for prompts that are scored, over all of them.

    Raises ConfigError naming the field when a value is out of range.
    """

    max_num_seqs: int = 64
    max_step_tokens: int = 512
    step_ms: float = 50.0
    max_waiting: int = 1024
    max_score_tokens: int = 64

    def __post_init__(self) -> None:
        for name, high in (
            ("max_num_seqs", MAX_SEQS),
            ("max_step_tokens", MAX_STEP_TOKENS),
            ("max_waiting", MAX_WAITING),
            ("max_score_tokens", MAX_STEP_TOKENS),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ConfigError(f"{name} must be an integer between 1 and {high}, not {value!r:.80}", field=name)
        step_ms = self.step_ms
        if isinstance(step_ms, bool) or not isinstance(step_ms, (int, float)):
            raise ConfigError(f"step_ms must be a number, not {step_ms!r:.80}", field="step_ms")
        if not (math.isfinite(step_ms) and step_ms > 0):
            raise ConfigError(f"step_ms must be above 0 and finite, not {step_ms!r}", field="step_ms")
