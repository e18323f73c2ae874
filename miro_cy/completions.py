"""From the events of a request to its completion."""

from __future__ import annotations

from dataclasses import replace

from miro_cy.requests import Completion, Event


class Gathered:
    """The events of one choice, put together."""

    def __init__(self, with_logprobs: bool) -> None:
        self._result = Completion(logprobs=[] if with_logprobs else None)
        self._pieces: list[str] = []

    def take(self, event: Event) -> None:
        """The next event of the choice."""
        result = self._result
        self._pieces.append(event.text)
        result.tokens.extend(event.tokens)
        if event.logprobs and result.logprobs is not None:
            result.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            result.finish_reason, result.stop, result.score = event.finish_reason, event.stop, event.score
            result.usage, result.timing = event.usage or result.usage, event.timing or result.timing

    def completion(self) -> Completion:
        """What came of all of them."""
        self._result.text = "".join(self._pieces)
        return self._result


def together(choices: list[Completion]) -> Completion:
    """The completion of a request from those of its choices."""
    return replace(choices[0], choices=choices)
