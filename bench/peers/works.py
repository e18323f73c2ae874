"""What is compared: works that each of two systems does in turn, and the figures that come out of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

#: Prompt and new tokens of each request of a decode.
SHORT = 16
NEW = 64

#: Of tok/s more is better, of times less.
Unit = Literal["tok/s", "ms", "s"]


class PeerError(Exception):
    """A system cannot be measured; one line that says why."""


class Named(Protocol):
    """What stands beside miro in a result."""

    name: str

    def version(self) -> dict[str, str | int]:
        """What to say of it, once something has been measured."""


class System(Named, Protocol):
    """Figures of one repetition each."""

    def prompt(self, length: int) -> float:
        """Tokens a second of one prompt."""

    def decode(self, requests: int) -> float:
        """Tokens a second of that many requests at once, SHORT tokens before and NEW tokens of each."""

    def depths(self, depths: Sequence[int]) -> list[float]:
        """Seconds a token of one request, at each depth."""

    def load(self) -> float:
        """Seconds until it is ready, in a process of its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """rows: title and unit of each figure that `run` returns."""

    rows: tuple[tuple[str, Unit], ...]
    run: Callable[[System], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Prompt lengths, numbers of requests, depths, and whether loading is compared, under that title."""

    prompts: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    load: str | None = None

    def works(self, layers: int) -> list[Work]:
        """layers: of the model. Depths are beyond SHORT."""
        works = [prompt_work(length) for length in self.prompts]
        works += [decode_work(requests) for requests in self.requests]
        works += [depth_work(depth, layers) for depth in self.depths]
        if self.load is not None:
            works.append(Work(((self.load, "s"),), lambda system: [system.load()]))
        return works


def prompt_work(length: int) -> Work:
    return Work(((f"prompt of {length}", "tok/s"),), lambda system: [system.prompt(length)])


def decode_work(requests: int) -> Work:
    title = f"decode, {requests} request{'s' * (requests > 1)}"
    return Work(((title, "tok/s"),), lambda system: [system.decode(requests)])


def depth_work(depth: int, layers: int) -> Work:
    """Speed at that depth; and attention alone, as what a token takes more than at SHORT, a layer."""

    def run(system: System) -> list[float]:
        shallow, deep = system.depths((SHORT, depth))
        return [1 / deep, 1e3 * (deep - shallow) / layers]

    return Work(((f"decode at {depth}", "tok/s"), (f"attention at {depth}, a layer", "ms")), run)
