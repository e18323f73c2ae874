"""Two loads: a long prompt arrives while streams run; many users ask with one common beginning."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from peers.works import PeerError
from served.prompts import Ids, Prompts
from served.systems import Answer, Served, ask

#: Tokens that every stream has before the long prompt arrives.
RUNNING = 8
#: Tokens of the long prompt's answer.
INTRUDER_NEW = 8
POLL_S = 0.005
WAIT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """streams, stream_words, stream_new: those that run, their prompts and most tokens; long_words: of the prompt that
    arrives. users: who ask at once, `requests` in all; prefix_words: their common beginning; words: more of each; new:
    tokens of an answer.
    """

    streams: int = 4
    stream_words: int = 120
    stream_new: int = 1024
    long_words: int = 2000
    users: int = 8
    requests: int = 24
    prefix_words: int = 600
    words: int = 20
    new: int = 32


@dataclass(frozen=True, slots=True)
class Intrusion:
    """Milliseconds. gap_p99, gap_max: of the streams' gaps that overlap the time from the long prompt's arrival to its
    first token; ttft: that time; alone: the same for another such prompt while nothing else runs.
    """

    gap_p99_ms: float
    gap_max_ms: float
    ttft_ms: float
    alone_ms: float


@dataclass(frozen=True, slots=True)
class Sharing:
    """seconds: until all answers were complete; ttft_p99_ms; cached: prompt tokens that each request did not compute,
    ascending, None where the system does not say.
    """

    seconds: float
    ttft_p99_ms: float
    cached: list[int] | None


@dataclass(frozen=True, slots=True)
class Intruding:
    """The prompts of one round of `intrude`, no two with a beginning in common: the long one that runs alone, those of
    the streams, and the long one that joins them.
    """

    alone: Ids
    streams: list[Ids]
    intruder: Ids

    @classmethod
    def draw(cls, load: Load, prompts: Prompts) -> Intruding:
        streams = [prompts.words(load.stream_words) for _ in range(load.streams)]
        return cls(prompts.words(load.long_words), streams, prompts.words(load.long_words))


def intrude(system: Served, load: Load, asked: Intruding) -> Intrusion:
    """A long prompt alone, then another while streams run."""
    alone = ask(system, asked.alone, INTRUDER_NEW).ttft
    over = threading.Event()
    answers = [Answer(0.0) for _ in range(load.streams)]
    with ThreadPoolExecutor(load.streams) as threads:
        running = [
            threads.submit(ask, system, prompt, load.stream_new, answer=answer, enough=over.is_set)
            for prompt, answer in zip(asked.streams, answers, strict=True)
        ]
        try:
            _wait_for(running, lambda: all(answer.tokens >= RUNNING for answer in answers))
            intruder = ask(system, asked.intruder, INTRUDER_NEW)
            # Each stream has a gap that ends after the first token now; the longest may be just that one.
            _wait_for(running, lambda: all(answer.times[-1] > intruder.times[0] for answer in answers))
        finally:
            over.set()
    since, until = intruder.sent, intruder.times[0]
    gaps = [1000 * gap for answer in answers for gap in answer.gaps(since, until)]
    return Intrusion(p99(gaps), max(gaps), 1000 * intruder.ttft, 1000 * alone)


def _wait_for(running: Sequence[Future[Answer]], condition: Callable[[], bool]) -> None:
    """Until the condition holds. Raises what ended a stream, and PeerError when one is over before."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / POLL_S)):
        if condition():
            return
        for stream in running:
            if stream.done():
                stream.result()
                raise PeerError("a stream ended too early: it needs more tokens (--stream-new)")
        pause.wait(POLL_S)
    raise PeerError(f"the streams did not get on within {WAIT_S} s")


def share(system: Served, load: Load, prompts: Sequence[Ids]) -> Sharing:
    """Users who take one prompt after the other until none is left."""
    left = deque(prompts)
    answers: list[Answer] = []

    def user() -> None:
        while left:
            try:
                prompt = left.popleft()
            except IndexError:  # another was faster
                return
            answers.append(ask(system, prompt, load.new))

    with ThreadPoolExecutor(load.users) as threads:
        for done in [threads.submit(user) for _ in range(load.users)]:
            done.result()
    seconds = max(answer.times[-1] for answer in answers) - min(answer.sent for answer in answers)
    cached = [answer.cached for answer in answers]
    known = [n for n in cached if n is not None]
    ttft = [1000 * answer.ttft for answer in answers]
    return Sharing(seconds, p99(ttft), sorted(known) if len(known) == len(cached) else None)


def p99(values: Sequence[float]) -> float:
    """The least of them that 99 % are not above."""
    return float(np.percentile(values, 99, method="inverted_cdf"))
