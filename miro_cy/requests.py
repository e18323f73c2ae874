"""What goes into the engine and what comes out: requests, step events and finished completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miro_client.results import Timing, TokenLogprob, Usage
from miro_cy.errors import MiroError
from miro_cy.sampling.params import SamplingParams

#: A prompt: text, {"messages": [{"role", "content"}, ...]} for the model's chat template, or {"tokens": [ids]}.
Prompt = str | Mapping[str, Any]
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True)
class Request:
    """One request to the step level: `Engine.add(request) -> id`."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(slots=True)
class Event:
    """What one step (or an abort) did for one choice of one request.

    text: characters that are now safe to send, possibly none; tokens: ids generated in this step.
    The last event of a choice has finish_reason set, with usage and timing; `stop` is the string or id that
    ended it (None for EOS); `error` is set exactly when finish_reason is "error".
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


@dataclass(slots=True)
class Completion:
    """A finished request. `tokens` includes the EOS or stop token that ended it; `text` does not."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    usage: Usage = field(default_factory=Usage)
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    timing: Timing = field(default_factory=Timing)


__all__ = ["Completion", "Event", "FinishReason", "Prompt", "Request", "Timing", "TokenLogprob", "Usage"]
