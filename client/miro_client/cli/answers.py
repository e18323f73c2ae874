"""How `miro run` and `miro chat` get answers, from an engine in this process or a worker: both look the same here.

An answer is a generator: it yields text as it comes and returns an Answer. Closing it ends the request. Of several
choices the first is yielded as it comes, the others behind it, each under its number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from miro_client.errors import ContextOverflow, Unsupported

if TYPE_CHECKING:
    from miro_client import Client
    from miro_cy import Engine


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: messages, and text instead where there are none or the model has no chat template.

    max_tokens None means at most default_max_tokens, fewer where the context ends before.
    """

    messages: list[dict[str, str]] | None = None
    text: str | None = None
    max_tokens: int | None = None
    default_max_tokens: int = 512
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """The whole answer; field names are those of --json. Times in milliseconds.

    score: of a beam search. choices: all answers if several were asked for, of which this is the first.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    usage: dict[str, int]
    timing: dict[str, float]
    score: float | None = None
    choices: list[Answer] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What --json prints: score and choices only where there are any."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("score", "choices")}
        if self.score is not None:
            told["score"] = self.score
        if self.choices:
            told["choices"] = [choice.as_json() for choice in self.choices]
        return told


Pieces = Generator[str, None, Answer]
#: ask(prompt text, or None; chat messages, or None; max_tokens, or None for the rest of the context; sampling)
Ask = Callable[[str | None, list[dict[str, str]] | None, int | None, dict[str, Any]], Pieces]


def answer(ask: Ask, question: Question) -> Pieces:
    """Ask once, and again in another way where the first is refused: without a template as text, and shorter.

    An answer of the default length that would pass the context's end is asked for again as "up to the end". Both are
    refusals that come before the first piece, so nothing is ever shown twice.
    """
    messages, limit = question.messages, question.max_tokens
    limit = question.default_max_tokens if limit is None else limit
    rest_of_context = False
    while True:
        text = question.text if messages is None else None
        with closing(ask(text, messages, None if rest_of_context else limit, question.sampling)) as pieces:
            try:
                first = next(pieces)
            except StopIteration as end:
                done: Answer = end.value
                return done
            except Unsupported:
                if messages is None or question.text is None:
                    raise
                messages = None
            except ContextOverflow:
                if rest_of_context or question.max_tokens is not None:
                    raise
                rest_of_context = True
            else:
                yield first
                return (yield from pieces)


def from_engine(engine: Engine) -> Ask:
    """Answers by an engine in this process."""
    from miro_cy import SamplingParams
    from miro_cy.completions import Gathered

    def ask(
        text: str | None, messages: list[dict[str, str]] | None, max_tokens: int | None, sampling: dict[str, Any]
    ) -> Pieces:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        choices = [Gathered(with_logprobs=False) for _ in range(params.n_choices)]
        heading = _heading(1) if len(choices) > 1 else ""
        for event in engine.stream({"messages": messages} if text is None else text, params):
            if event.error is not None:
                raise event.error
            choices[event.choice].take(event)
            if event.choice == 0:
                yield heading + event.text
                heading = ""
        return (yield from _all_of([choice.completion() for choice in choices]))

    return ask


def from_worker(client: Client) -> Ask:
    """Answers by the worker that a client is connected to."""

    def ask(
        text: str | None, messages: list[dict[str, str]] | None, max_tokens: int | None, sampling: dict[str, Any]
    ) -> Pieces:
        given = sampling if max_tokens is None else {**sampling, "max_tokens": max_tokens}
        several = max(sampling.get("n", 1), sampling.get("beam_width", 1)) > 1
        heading = _heading(1) if several else ""
        with closing(client.generate(text, messages=messages, **given)) as chunks:
            for chunk in chunks:
                if chunk.choice == 0:
                    yield heading + chunk.text
                    heading = ""
            choices = chunks.result.choices
        if heading:  # the first has no text, and so has had no chunk
            yield heading
        return (yield from _all_of(choices))

    return ask


def stopped(text: str) -> Answer:
    """An answer that the user ended, whose tokens and times nobody told."""
    return Answer(text, [], "cancelled", _usage(None), _timing(None))


def _all_of(choices: list[Any]) -> Pieces:
    """Yields the texts of the choices behind the first; the answer that holds all of them."""
    answers = [
        Answer(
            choice.text,
            [int(token) for token in choice.tokens],
            choice.finish_reason,
            _usage(choice.usage),
            _timing(choice.timing),
            choice.score,
        )
        for choice in choices
    ]
    for number, (before, one) in enumerate(pairwise(answers), 2):
        line_break = "\n" if before.text and not before.text.endswith("\n") else ""
        yield line_break + _heading(number) + one.text
    return replace(answers[0], choices=answers if len(answers) > 1 else [])


def _heading(number: int) -> str:
    return f"[{number}]\n"


def _usage(usage: Any) -> dict[str, int]:
    return {key: getattr(usage, key, 0) for key in ("prompt_tokens", "cached_tokens", "completion_tokens")}


def _timing(timing: Any) -> dict[str, float]:
    return {key: getattr(timing, key, 0.0) for key in ("queue_ms", "prefill_ms", "decode_ms")}
