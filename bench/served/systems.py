"""What a load needs of a system, and miro's worker as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from miro_client.client import Client
from peers.works import Named, PeerError

Clock = Callable[[], float]
#: Until the next piece of an answer.
DEADLINE_S = 600


@dataclass(slots=True)
class Answer:
    """sent: when it was asked for; times: when each piece came, by the same clock; tokens: how many. cached: tokens of
    the prompt that were not computed, as the system says at the end; None for one that was given up.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between two pieces, of those that overlap the time from `since` to `until`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [late - early for early, late in pairs if late > since and early < until]


class Served(Named, Protocol):
    """A system that answers streams over a socket; any number of threads ask it at once."""

    def pieces(self, prompt: Sequence[int], new: int, answer: Answer) -> Iterator[int]:
        """Generate exactly `new` tokens after a prompt, greedily: yields how many each piece has, as it comes, and sets
        answer.cached at the end. Closing the iterator cancels.
        """


def ask(
    system: Served,
    prompt: Sequence[int],
    new: int,
    *,
    answer: Answer | None = None,
    enough: Callable[[], bool] = lambda: False,
    clock: Clock = time.perf_counter,
) -> Answer:
    """An answer, to its end or until it is `enough` after a piece. answer: where others can watch it grow."""
    if answer is None:
        answer = Answer(clock())
    answer.sent = clock()
    # An iterator that the protocol does not promise to be closable, but both are.
    with closing(system.pieces(prompt, new, answer)) as pieces:  # type: ignore[type-var]
        for n in pieces:
            answer.times.append(clock())
            answer.tokens += n
            if enough():
                return answer
    if answer.tokens != new:
        raise PeerError(f"{system.name} gave {answer.tokens} tokens instead of {new}")
    return answer


class Miro:
    """A worker at an endpoint."""

    name = "miro"

    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint, timeout=DEADLINE_S)

    def version(self) -> dict[str, str | int]:
        return {"version": self._client.hello().server}

    @property
    def block_size(self) -> int:
        return self._client.models()[0].block_size

    def pieces(self, prompt: Sequence[int], new: int, answer: Answer) -> Iterator[int]:
        generation = self._client.generate(tokens=prompt, max_tokens=new, temperature=0.0, ignore_eos=True)
        with generation:
            for chunk in generation:
                if chunk.tokens:
                    yield len(chunk.tokens)
            answer.cached = generation.result.usage.cached_tokens

    def close(self) -> None:
        self._client.close()
