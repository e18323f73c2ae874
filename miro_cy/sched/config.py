"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from miro_client.checks import check_int
from miro_cy.config import MAX_NUM_SEQS, MAX_STEP_TOKENS, Admission, PolicyName, check_scheduling


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
        check_scheduling(self)
        check_int("max_choices", self.max_choices, 1, MAX_NUM_SEQS)
        check_int("max_score_tokens", self.max_score_tokens, 1, MAX_STEP_TOKENS)
