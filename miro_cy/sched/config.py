"""Settings of the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from miro_cy.config import Admission, PolicyName
from miro_cy.errors import ConfigError

MAX_SEQS = 65_536
MAX_STEP_TOKENS = 1 << 20
MAX_WAITING = 1 << 20
MAX_AGEING_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and targets of a step.

    max_num_seqs: most sequences that run (hold KV blocks) at once.
    max_step_tokens: most tokens in a step. Decode rows go even beyond it, and so does a minimal prompt chunk.
    step_ms: how long a step that carries decode rows should take, in milliseconds; prompt chunks are cut to fit.
    max_waiting: most sequences that may wait; beyond it new ones are refused. One that will be forked counts as all of
        them, and is taken into an empty queue in any case.
    max_choices: most sequences that a request may have.
    max_score_tokens: most logits rows a step computes for prompts that are scored, over all of them.
    policy: who is admitted next: "fcfs", first come first served; "priority", the highest first, with ageing; "fair",
        the client that was served least.
    ageing_ms: under "priority", how long a wait weighs as much as one level.
    admission: "watermark" takes a sequence when the blocks for its tokens are free and a few beside them, and preempts
        when the pool runs out; "reserve" keeps blocks for all tokens that it may come to have, and never preempts.
    watermark: under "watermark", the share of the pool that must stay free beside a block for each running sequence.

    Raises ConfigError naming the field when a value is out of range.
    """

    max_num_seqs: int = 64
    max_step_tokens: int = 512
    step_ms: float = 50.0
    max_waiting: int = 1024
    max_choices: int = 64
    max_score_tokens: int = 64
    policy: PolicyName = "fcfs"
    ageing_ms: float = 10_000.0
    admission: Admission = "watermark"
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name, high in (
            ("max_num_seqs", MAX_SEQS),
            ("max_step_tokens", MAX_STEP_TOKENS),
            ("max_waiting", MAX_WAITING),
            ("max_choices", MAX_SEQS),
            ("max_score_tokens", MAX_STEP_TOKENS),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ConfigError(f"{name} must be an integer between 1 and {high}, not {value!r:.80}", field=name)
        self._check_choice("policy", get_args(PolicyName))
        self._check_choice("admission", get_args(Admission))
        self._check_number("step_ms", math.inf)
        self._check_number("ageing_ms", MAX_AGEING_MS)
        self._check_number("watermark", 0.5, zero=True)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r:.80}", field=name)

    def _check_number(self, name: str, high: float, *, zero: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} must be a number, not {value!r:.80}", field=name)
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0)) and value <= high):
            least = "at least" if zero else "above"
            most = f" and at most {high:g}" if math.isfinite(high) else ""
            raise ConfigError(f"{name} must be finite, {least} 0{most}, not {value!r:.80}", field=name)
