"""What the threads tell one another about a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miro_client.errors import RequestError
from miro_cy.requests import Event, Request
from miro_cy.sampling.params import SamplingParams


@dataclass(eq=False, slots=True)
class Job:
    """One GENERATE on its way through the threads. The I/O thread makes it; it alone answers the client.

    prompt: text, {"messages": [wire.ChatMessage]} or {"tokens": int32 little-endian bytes}; None once it is prepared or
    cancelled.
    choices: how many texts it is to give, each with an END of its own.
    received: when, by the worker's clock; queue_ms and deadline_ms count from then. client: its connection.
    cancelled: set by the I/O thread when nobody waits for the outcome; read by the others, which then drop the job.
    """

    prompt: str | Mapping[str, Any] | None
    params: SamplingParams
    received: float
    priority: int = 0
    client: str = ""
    queue_ms: int | None = None
    deadline_ms: int | None = None
    cancelled: bool = False

    @property
    def choices(self) -> int:
        return self.params.n_choices


@dataclass(slots=True)
class Prepared:
    """From the text thread to the step thread. tokens: the prompt's ids as they travel."""

    job: Job
    request: Request
    tokens: bytes


@dataclass(slots=True)
class Abort:
    """From the I/O thread to the step thread."""

    job: Job


@dataclass(slots=True)
class Admitted:
    """The engine took the request; waited_ms is the time since it was received."""

    job: Job
    tokens: bytes
    seed: int
    waited_ms: float


@dataclass(slots=True)
class Failed:
    """The request, all of it, ended by no event of the engine: before it was taken, or with a step that failed."""

    job: Job
    error: RequestError


@dataclass(slots=True)
class Stepped:
    """What a step did for a choice of the request."""

    job: Job
    event: Event


Outcome = Admitted | Failed | Stepped
