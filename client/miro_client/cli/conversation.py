"""What has been said in a chat, and the answer to the next question."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from miro_client.cli.answers import Answer, Ask, Question, answer, stopped
from miro_client.cli.console import TextOut
from miro_client.errors import RequestError

#: finish_reason of an answer that the user stopped; answers.stopped makes one.
STOPPED = "cancelled"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer; finish_reason tells a whole answer from one that a limit or the user cut."""

    question: str
    answer: str
    finish_reason: str


@dataclass(slots=True)
class Conversation:
    """The exchanges so far, and how the next question is asked.

    interrupts: KeyboardInterrupt comes only inside it, while an answer is awaited, and ends the answer alone; None
    where it ends everything.
    """

    ask: Ask
    interrupts: AbstractContextManager[None] | None
    system: str | None = None
    max_tokens: int | None = None
    default_max_tokens: int = 512
    sampling: Mapping[str, Any] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)

    def say(self, text: str, out: TextOut | None, *, instead_of_last: bool = False) -> Answer:
        """Ask, write the answer as it comes, and remember both; what fails leaves the conversation as it was.

        KeyboardInterrupt ends the answer: what had come of it, if anything, is remembered, its reason STOPPED.
        """
        before = self.exchanges[:-1] if instead_of_last else self.exchanges
        question = Question(
            messages=self._messages(before, text),
            max_tokens=self.max_tokens,
            default_max_tokens=self.default_max_tokens,
            sampling=dict(self.sampling),
        )
        try:
            result = self._answer(question, out)
        finally:
            if out is not None:
                out.end()
        if result.finish_reason not in ("stop", "length", STOPPED):
            raise RequestError(f"the request was ended before its answer was complete ({result.finish_reason})")
        if result.text or result.finish_reason != STOPPED:
            self.exchanges = [*before, Exchange(text, result.text, result.finish_reason)]
        return result

    def _messages(self, before: list[Exchange], text: str) -> list[dict[str, str]]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in before:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        return [*messages, {"role": "user", "content": text}]

    def _answer(self, question: Question, out: TextOut | None) -> Answer:
        come: list[str] = []
        with closing(answer(self.ask, question)) as pieces:
            while True:
                try:
                    with self.interrupts or nullcontext():
                        piece = next(pieces)
                except StopIteration as end:
                    result: Answer = end.value
                    return result
                except KeyboardInterrupt:
                    if self.interrupts is None:
                        raise
                    return stopped("".join(come))
                come.append(piece)
                if out is not None:
                    out.write(piece)
