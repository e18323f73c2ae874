"""How `miro run` and `miro chat` get answers, from an engine in this process or a worker: both look the same here.

An answer is a generator: it yields text as it comes and returns an Answer. Closing it ends the request.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
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
    """The whole answer; field names are those of --json. Times in milliseconds."""

    text: str
    tokens: list[int]
    finish_reason: str
    usage: dict[str, int]
    timing: dict[str, float]


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

    def ask(
        text: str | None, messages: list[dict[str, str]] | None, max_tokens: int | None, sampling: dict[str, Any]
    ) -> Pieces:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        whole: list[str] = []
        tokens: list[int] = []
        last = None
        for event in engine.stream({"messages": messages} if text is None else text, params):
            if event.error is not None:
                raise event.error
            whole.append(event.text)
            tokens.extend(int(token) for token in event.tokens)
            last = event
            yield event.text
        reason = (last and last.finish_reason) or "cancelled"
        usage = getattr(last, "usage", None)
        return Answer("".join(whole), tokens, reason, _usage(usage), _timing(getattr(last, "timing", None)))

    return ask


def from_worker(client: Client) -> Ask:
    """Answers by the worker that a client is connected to."""

    def ask(
        text: str | None, messages: list[dict[str, str]] | None, max_tokens: int | None, sampling: dict[str, Any]
    ) -> Pieces:
        given = sampling if max_tokens is None else {**sampling, "max_tokens": max_tokens}
        whole: list[str] = []
        tokens: list[int] = []
        with closing(client.generate(text, messages=messages, **given)) as chunks:
            for chunk in chunks:
                whole.append(chunk.text)
                tokens.extend(chunk.tokens)
                yield chunk.text
            result = chunks.result
        return Answer("".join(whole), tokens, result.finish_reason, _usage(result.usage), _timing(result.timing))

    return ask


def stopped(text: str) -> Answer:
    """An answer that the user ended, whose tokens and times nobody told."""
    return Answer(text, [], "cancelled", _usage(None), _timing(None))


def _usage(usage: Any) -> dict[str, int]:
    return {key: getattr(usage, key, 0) for key in ("prompt_tokens", "cached_tokens", "completion_tokens")}


def _timing(timing: Any) -> dict[str, float]:
    return {key: getattr(timing, key, 0.0) for key in ("queue_ms", "prefill_ms", "decode_ms")}
