"""Live requests: what each makes of the logits of its sequences.

A request begins as one sequence that carries all its choices. When the prompt is computed, each choice draws its first
token from the same logits; the first that goes on keeps the sequence, the others go on in forks of it. A kind of
request is a subclass of Live: it sees all its logits of a step at once and says what shall become of its sequences; the
core carries that out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miro_cy.errors import NonFinite
from miro_cy.requests import Event, FinishReason, TokenLogprob, Usage
from miro_cy.sampling.params import SamplingParams
from miro_cy.sampling.sampler import TokenSampler
from miro_cy.text import TextStream, Tokenizer

F32 = NDArray[np.float32]


class Rows(NamedTuple):
    """A sequence's logits of a step are logits[first:last]; position: where the token after the last of them goes."""

    seq: int
    first: int
    last: int
    position: int


@dataclass(slots=True)
class Choice:
    """One of the things that a request is to deliver, each with an end and a usage of its own."""

    index: int
    usage: Usage


class Told(NamedTuple):
    """An event of a choice; with a finish_reason it is the last, and ends the sequence if that carries no other."""

    seq: int
    choice: Choice
    event: Event


@dataclass(slots=True)
class Outcome:
    """What becomes of sequences after a step.

    tokens: what each goes on with. forks: (sequence, token, choice), a choice that leaves the sequence and goes on with
    the token in a fork of it. settled: sequences whose families are forked no more. ready: requests that want to
    `go_on` when the step is committed.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    forks: list[tuple[int, int, Choice]] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    ready: list[Live] = field(default_factory=list)


class Live(ABC):
    """A request some of whose choices have not ended.

    carried: the choices of each sequence, by its id. others: sequences that carry none, and end with the request.
    """

    def __init__(self, request_id: int, choices: list[Choice]) -> None:
        self.request_id = request_id
        self.choices = choices
        self.carried: dict[int, list[Choice]] = {}
        self.others: list[int] = []

    def begin(self, seq: int) -> None:
        """Its first sequence, which carries all."""
        self.carried[seq] = [*self.choices]

    @abstractmethod
    def take(self, rows: list[Rows], logits: F32, out: Outcome) -> list[Told]:
        """Turn all logits that a step gave its sequences into events, and add to the step's outcome."""

    def go_on(self) -> list[Told]:
        """Between the commit of a step after which it was `ready` and the next plan: change its sequences by itself."""
        raise NotImplementedError

    def give_up(self) -> int | None:
        """End a sequence that only waits for others of the request, so that they can be computed; its id, if any."""
        return None

    def event(self, choice: Choice, reason: FinishReason | None = None) -> Event:
        """An event of a choice, its last one if there is a reason."""
        return Event(self.request_id, choice.index, finish_reason=reason)

    def drop(self, seq: int, choice: Choice) -> bool:
        """A choice leaves a sequence; whether that carries no other."""
        choices = self.carried[seq]
        choices.remove(choice)
        if not choices:
            del self.carried[seq]
        return not choices


class Scored(Live):
    """Wants the logits themselves: those of prompt positions [first, first + len(out)), float32 [rows, vocab]."""

    def __init__(self, request_id: int, n_prompt: int, first: int, out: F32) -> None:
        super().__init__(request_id, [Choice(0, Usage(prompt_tokens=n_prompt))])
        self._first = first
        self._out = out

    def take(self, rows: list[Rows], logits: F32, out: Outcome) -> list[Told]:
        ((seq, first, last, position),) = rows
        end = position - self._first
        self._out[end - (last - first) : end] = logits[first:last]
        return [Told(seq, self.choices[0], self.event(self.choices[0], "length"))] if end == len(self._out) else []


@dataclass(slots=True)
class Text(Choice):
    """A text: how its tokens are picked and turned into characters."""

    sampler: TokenSampler
    stream: TextStream


class Sampled(Live):
    """`params.n` texts, each drawn for itself; the first draws what it would alone."""

    def __init__(
        self, request_id: int, n_prompt: int, params: SamplingParams, max_new: int, tokenizer: Tokenizer
    ) -> None:
        self._texts = [
            Text(i, Usage(prompt_tokens=n_prompt), TokenSampler(params, i), tokenizer.stream(params.stop))
            for i in range(params.n)
        ]
        super().__init__(request_id, [*self._texts])
        self._params = params
        self._max_new = max_new
        self._eos = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids)

    def take(self, rows: list[Rows], logits: F32, out: Outcome) -> list[Told]:
        told = []
        for seq, _, last, position in rows:
            carried = self.carried[seq]
            going_on: list[tuple[int, Text]] = []
            for choice in carried:
                text = self._texts[choice.index]
                event, token = self._draw(text, logits, last - 1, position)
                told.append(Told(seq, choice, event))
                if event.finish_reason is None:
                    going_on.append((token, text))
            if going_on:
                out.tokens[seq] = going_on[0][0]
                out.forks += [(seq, token, text) for token, text in going_on[1:]]
                if len(carried) > 1:
                    out.settled.append(seq)
        return told

    def _draw(self, text: Text, logits: F32, row: int, position: int) -> tuple[Event, int]:
        """The event of the token for `position`, picked from a logits row, and the token; the last one if it ends."""
        token = text.sampler.pick(logits, row, position)
        if token < 0:
            event = self.event(text, "error")
            event.error = NonFinite(f"the model gave no finite logits at position {position}")
            return event, token
        text.usage.completion_tokens += 1
        event = self.event(text)
        event.tokens = (token,)
        if self._params.logprobs is not None:
            event.logprobs = [TokenLogprob(*text.sampler.logprob(logits, row, token))]
        event.text, event.finish_reason, event.stop = self._advance(text, token)
        return event, token

    def _advance(self, text: Text, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Characters that are now safe to send, and whether and why the text ends with this token."""
        if token in self._params.stop_token_ids:
            return text.stream.finish(), "stop", token
        if token in self._eos:
            return text.stream.finish(), "stop", None
        characters, stop = text.stream.push(token)
        if stop is not None:
            return characters, "stop", stop
        if text.usage.completion_tokens == self._max_new:
            return characters + text.stream.finish(), "length", None
        return characters, None, None
