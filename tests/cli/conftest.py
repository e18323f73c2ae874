"""An engine and a worker's client that answer without a model, put where the CLI finds the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import miro_client
import miro_cy
from miro_cy.completions import Gathered, together
from miro_cy.errors import ContextOverflow, MiroError, Unsupported
from miro_cy.requests import Event, Timing, Usage
from miro_cy.sampling.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))


class FakeEngine:
    """Streams `words`; the class attributes say how the next one behaves, `asked` and `loaded` what it was asked."""

    words: tuple[str, ...] = ("The capital", " is", " Paris.")
    has_template = True
    room = 4096
    error: BaseException | None = None
    finish_reason: Any = "stop"
    loaded: tuple[str, dict[str, Any]] | None = None
    asked: list[tuple[Any, SamplingParams]]
    closed = 0
    streams_closed = 0
    name = "fake"
    context = 4096
    generation = SimpleNamespace(sampling={})

    @property
    def tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(has_template=self.has_template)

    @classmethod
    def load(cls, path_or_name: str, **overrides: Any) -> FakeEngine:
        cls.loaded = (path_or_name, overrides)
        return cls()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        type(self).closed += 1

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Event]:
        cls = type(self)
        cls.asked.append((prompt, params))
        if isinstance(prompt, dict) and not cls.has_template:
            raise Unsupported("this model has no chat template")
        if params.max_tokens is not None and params.max_tokens > cls.room:
            raise ContextOverflow(f"prompt and max_tokens need more than {cls.room} tokens", field="max_tokens")
        try:
            for index, word in enumerate(cls.words):
                for choice in range(params.n_choices):
                    yield Event(1, choice, word.upper() if choice else word, tokens=[index])
            if isinstance(cls.error, MiroError):
                yield Event(1, finish_reason="error", error=cls.error)
                return
            if cls.error is not None:
                raise cls.error
            usage = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=len(cls.words))
            for choice in range(params.n_choices):
                score = -0.5 - choice if params.beam_width > 1 else None
                timing = Timing(1.0, 2.0, 3.0)
                yield Event(1, choice, finish_reason=cls.finish_reason, usage=usage, timing=timing, score=score)
        finally:
            cls.streams_closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    fake = type("Fake", (FakeEngine,), {"asked": []})
    monkeypatch.setitem(vars(miro_cy), "Engine", fake)
    return fake


class FakeStream:
    """What Client.generate returns: an iterator with `.result` at its end."""

    def __init__(self, events: Iterator[Event], n_choices: int) -> None:
        self._events = events
        self._choices = [Gathered(with_logprobs=False) for _ in range(n_choices)]
        self.result: Any = None

    def __iter__(self) -> FakeStream:
        return self

    def __next__(self) -> Event:
        for event in self._events:
            if event.error is not None:
                raise event.error
            self._choices[event.choice].take(event)
            if event.finish_reason is None:
                return event
        self.result = together([choice.completion() for choice in self._choices])
        raise StopIteration

    def close(self) -> None:
        self._events.close()  # type: ignore[attr-defined]


class FakeClient:
    """Answers as FakeEngine does."""

    engine: type[FakeEngine]
    endpoints: list[str]

    def __init__(self, endpoint: str) -> None:
        self.endpoints.append(endpoint)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def models(self, timeout: float | None = None) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="fake", context=4096, chat=self.engine.has_template, sampling={})]

    def generate(self, prompt: str | None, *, messages: Any = None, **sampling: Any) -> FakeStream:
        asked = {"messages": messages} if prompt is None else prompt
        params = SamplingParams(**sampling)
        return FakeStream(self.engine().stream(asked, params), params.n_choices)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, engine: type[FakeEngine]) -> type[FakeClient]:
    fake = type("Fake", (FakeClient,), {"engine": engine, "endpoints": []})
    monkeypatch.setitem(vars(miro_client), "Client", fake)
    monkeypatch.setattr("miro_client.endpoint.default_endpoint", lambda: "ipc:///the/default")
    return fake


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()
