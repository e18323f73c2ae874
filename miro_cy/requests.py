"""What goes into the engine and what comes out: requests, step events and finished completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miro_client.checks import check_int, check_number
from miro_client.results import Timing, TokenLogprob, Usage
from miro_cy.errors import BadField, MiroError
from miro_cy.sampling.params import SamplingParams

#: A prompt: text, {"messages": [{"role", "content"}, ...]} for the model's chat template, or {"tokens": [ids]}.
Prompt = str | Mapping[str, Any]
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
#: Priorities lie between -MAX_PRIORITY and MAX_PRIORITY.
MAX_PRIORITY = 100
#: Longest deadline, in milliseconds, and most characters of a client's name.
MAX_DEADLINE_MS = 2**53
MAX_CLIENT_CHARS = 256


@dataclass(slots=True)
class Request:
    """One request to the step level: `Engine.add(request) -> id`.

    priority: -100 to 100, higher is sooner, under the policy "priority". client: whom it counts for under "fair".
    queue_ms, deadline_ms: it ends with reason "deadline" unless it has begun, or ended, within so many milliseconds.

    Raises BadField naming the field when a value has the wrong type or is out of range.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    client: str = ""
    queue_ms: float | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, error=BadField)
        if not isinstance(self.client, str) or len(self.client) > MAX_CLIENT_CHARS:
            raise BadField(f"client must be a text of at most {MAX_CLIENT_CHARS} characters", field="client")
        for name in ("queue_ms", "deadline_ms"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), MAX_DEADLINE_MS, error=BadField)


@dataclass(slots=True)
class Event:
    """What one step (or an abort) did for one choice of one request.

    text: characters that are now safe to send, possibly none; tokens: ids generated in this step.
    The last event of a choice has finish_reason set, with usage and timing; `stop` is the string or id that
    ended it (None for EOS); `error` is set exactly when finish_reason is "error". Of a beam search each choice has one
    event alone, with its score. prompt_logprobs come once, with the first event of choice 0 after the prompt.
    """

    request_id: int
    choice: int = 0
    text: str = ""
    tokens: Sequence[int] = ()
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: MiroError | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    score: float | None = None


@dataclass(slots=True)
class Completion:
    """A finished request. `tokens` includes the EOS or stop token that ended it; `text` does not.

    prompt_logprobs: one a token of the prompt, None for the first, which nothing comes before; None altogether if they
    were not asked for, or the request ended before they were complete. Of the choices, the first has them.
    choices: all of its texts, each with what this has (but no choices of its own); this is the first of them.
    score: by which they are in order, best first; None where they are not.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    usage: Usage = field(default_factory=Usage)
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    timing: Timing = field(default_factory=Timing)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choices: list[Completion] = field(default_factory=list)
    score: float | None = None


__all__ = ["Completion", "Event", "FinishReason", "Prompt", "Request", "Timing", "TokenLogprob", "Usage"]
