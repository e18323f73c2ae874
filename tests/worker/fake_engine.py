"""An engine without a model: deterministic tokens, and switches for everything that can go wrong.

Run as a program it serves on the endpoint given: `python fake_engine.py ENDPOINT [STEP_SECONDS] [GRACE_MS]`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miro_client.errors import BadField, ContextOverflow, QueueFull
from miro_cy.requests import Event, Request, Timing, TokenLogprob, Usage
from miro_cy.sampling.params import SamplingParams
from miro_cy.text.messages import check_messages

CONTEXT = 4096
MAX_RUNNING = 8
DEFAULT_MAX_TOKENS = 16


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def token_at(prompt: list[int], index: int, choice: int = 0) -> int:
    return (sum(prompt) * 7 + 31 * index + 13 * choice) % 997


def answer(prompt: list[int], count: int, choice: int = 0) -> tuple[str, list[int]]:
    """The text and tokens the fake generates for a prompt."""
    tokens = [token_at(prompt, i, choice) for i in range(count)]
    return "".join(f"{token} " for token in tokens), tokens


def scores(prompt: list[int], top: int) -> list[TokenLogprob | None]:
    """The log-probabilities that the fake gives a prompt."""
    tokens = prompt[1:]
    return [None, *(TokenLogprob(-token / 2, [(token, -float(i)) for i in range(top)]) for token in tokens)]


@dataclass
class Running:
    """A request. limits: how many tokens each choice that has not ended will have."""

    prompt: list[int]
    params: SamplingParams
    done: int = 0
    aborted: bool = False
    limits: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        limit = DEFAULT_MAX_TOKENS if self.params.max_tokens is None else self.params.max_tokens
        self.limits = dict.fromkeys(range(self.params.n_choices), limit)


class FakeEngine:
    """`gate` closed holds steps, `text_gate` closed holds prepare; `step_errors` are raised, one a step.

    `shorter`: so many tokens less has each choice than the one before it.
    """

    name = "fake"
    context = CONTEXT
    fingerprint = "fake/1"
    vocab_size = 1000

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.text_gate = threading.Event()
        self.text_gate.set()
        self.warm_gate = threading.Event()
        self.warm_gate.set()
        self.warm_errors: deque[Exception] = deque()
        self.step_errors: deque[Exception] = deque()
        self.add_errors: deque[Exception] = deque()
        self.prepare_errors: deque[Exception] = deque()
        self.max_waiting = 10_000
        self.shorter = 0
        self.steps = 0
        self.prepared: list[Any] = []
        self.added: list[list[int]] = []
        self.requests: list[Request] = []
        self.closed = False
        self._requests: dict[int, Running] = {}
        self._next = 0

    def prepare(self, prompt: str | Mapping[str, Any], params: SamplingParams) -> Request:
        self.prepared.append(prompt)
        self.text_gate.wait(30)
        if self.prepare_errors:
            raise self.prepare_errors.popleft()
        if isinstance(prompt, str):
            ids = ids_of(prompt)
        elif "messages" in prompt:
            messages = check_messages(prompt["messages"])
            ids = ids_of("".join(f"{m['role']}:{m.get('content')}\n" for m in messages))
        else:
            ids = list(prompt["tokens"])
            if not all(0 <= token < self.vocab_size for token in ids):
                raise BadField("a token id is not in the vocabulary", field="tokens")
        if len(ids) + (params.max_tokens or 0) > CONTEXT:
            raise ContextOverflow(f"{len(ids)} + {params.max_tokens} tokens exceed {CONTEXT}", field="max_tokens")
        seed = 1234 if params.seed is None else params.seed
        names = ("n", "beam_width", "max_tokens", "logprobs", "prompt_logprobs")
        fixed = SamplingParams(seed=seed, **{name: getattr(params, name) for name in names})
        return Request({"tokens": np.array(ids, np.int32)}, fixed)

    def add(self, request: Request) -> int:
        if self.add_errors:
            raise self.add_errors.popleft()
        if len(self._requests) >= self.max_waiting:
            raise QueueFull("the engine's queue is full", retry_after_ms=77)
        assert isinstance(request.prompt, Mapping)
        prompt = [int(token) for token in request.prompt["tokens"]]
        self.added.append(prompt)
        self.requests.append(request)
        self._next += 1
        running = self._requests[self._next] = Running(prompt, request.params)
        running.limits = {i: max(1, limit - i * self.shorter) if i else limit for i, limit in running.limits.items()}
        return self._next

    def abort(self, request_id: int) -> bool:
        running = self._requests.get(request_id)
        if running is None:
            return False
        running.aborted = True
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Event]:
        self.gate.wait(30)
        self.steps += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.step_errors:
            raise self.step_errors.popleft()
        chosen = [i for i, r in self._requests.items() if r.aborted]
        chosen += [i for i, r in self._requests.items() if not r.aborted][:MAX_RUNNING]
        return [event for request_id in chosen for event in self._advance(request_id)]

    def _advance(self, request_id: int) -> list[Event]:
        running = self._requests[request_id]
        if running.params.beam_width > 1:
            del self._requests[request_id]
            return [self._hypothesis(Event(request_id, choice), running, n) for choice, n in running.limits.items()]
        events = [self._one(Event(request_id, choice), running, limit) for choice, limit in running.limits.items()]
        if running.done == 0 and not running.aborted and running.params.prompt_logprobs is not None:
            events[0].prompt_logprobs = scores(running.prompt, running.params.prompt_logprobs)
        running.done += 1
        running.limits = {e.choice: running.limits[e.choice] for e in events if e.finish_reason is None}
        if not running.limits:
            del self._requests[request_id]
        return events

    def _hypothesis(self, event: Event, running: Running, limit: int) -> Event:
        """All of a choice of a beam search, in its only event."""
        event.text, event.tokens = answer(running.prompt, limit, event.choice)
        event.finish_reason, event.score = "cancelled" if running.aborted else "length", -1.0 - event.choice
        event.usage, event.timing = Usage(len(running.prompt), 0, limit), Timing(1.0, 2.0, 3.0)
        return event

    def _one(self, event: Event, running: Running, limit: int) -> Event:
        done = running.done
        if not running.aborted and done < limit:
            token = token_at(running.prompt, done, event.choice)
            done += 1
            event.text, event.tokens = f"{token} ", [token]
            if running.params.logprobs is not None:
                event.logprobs = [TokenLogprob(-0.5, [(token, -0.5), (1, -2.0)][: running.params.logprobs])]
        if running.aborted or done >= limit:
            event.finish_reason = "cancelled" if running.aborted else "length"
            event.usage = Usage(len(running.prompt), 0, done)
            event.timing = Timing(1.0, 2.0, 3.0)
        return event

    def stats(self) -> dict[str, Any]:
        running = min(MAX_RUNNING, len(self._requests))
        return {"running": running, "waiting": len(self._requests) - running, "free_blocks": 100 - running}

    def describe(self) -> dict[str, Any]:
        cache = {"kv_dtype": "int8", "kv_bytes_per_token": 80, "capacity": 8192}
        return {"name": self.name, "context": self.context, "fingerprint": self.fingerprint, **cache}

    def warm_up(self) -> None:
        self.warm_gate.wait(30)
        if self.warm_errors:
            raise self.warm_errors.popleft()

    def close(self) -> None:
        self.closed = True


def main() -> int:
    from miro_worker import Worker, WorkerConfig

    engine = FakeEngine(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    config = WorkerConfig(grace_ms=int(sys.argv[3]) if len(sys.argv) > 3 else 200)
    worker = Worker(engine, sys.argv[1], config=config)
    return worker.run(lambda: print("ready", flush=True), final=True)


if __name__ == "__main__":
    raise SystemExit(main())
