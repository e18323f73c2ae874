"""What a client gets back. Usage, Timing and TokenLogprob are the engine's own too: this module is a leaf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """Natural-log probability of a token, and of the most likely tokens at its position, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Usage:
    """Token counts of a request; cached_tokens are prompt tokens that were not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Timing:
    """Where a request's time went, in milliseconds of the engine's clock."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(slots=True)
class Chunk:
    """One piece of a stream: whole characters, and the ids generated since the last piece of the same choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    choice: int = 0


@dataclass(slots=True)
class Result:
    """A finished request. `tokens` includes the EOS or stop token that ended it; `text` does not.

    prompt_tokens, seed and fingerprint are what a later request needs to repeat this one.
    prompt_logprobs: if asked for and complete, one a prompt token, None for the first, which nothing comes before; of
    the choices, the first has them.
    choices: all answers, each with what this has (but no choices of its own); this is the first of them.
    score: by which they are in order, best first; None where they are not.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    usage: Usage = field(default_factory=Usage)
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    timing: Timing = field(default_factory=Timing)
    prompt_tokens: list[int] = field(default_factory=list)
    seed: int | None = None
    fingerprint: str = ""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choices: list[Result] = field(default_factory=list)
    score: float | None = None
