"""Streaming detokeniser: token ids in, text that is safe to send out, stop strings found on the way.

All matching is done in bytes, and bytes leave in order through one gate, so nothing is sent twice or lost:

    token bytes -> [ held: may be the beginning of a stop ] -> [ an unfinished character ] -> text
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache


class StopMatcher:
    """Finds the first of several byte strings in a stream (Aho and Corasick, 1975).

    States are numbered; 0 is the start. `depth[s]` is how many of the last bytes may be the beginning of a stop.
    `hit[s]` is the index of the longest stop that ends in s, or -1.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.hit = [-1]
        for i, stop in enumerate(stops):
            state = 0
            for byte in stop:
                if byte not in self._next[state]:
                    self._next[state][byte] = self._add(self.depth[state] + 1)
                state = self._next[state][byte]
            if stop and self.hit[state] < 0:
                self.hit[state] = i
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for byte, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], byte)
                if self.hit[child] < 0:
                    self.hit[child] = self.hit[self._fail[child]]
                queue.append(child)

    def _add(self, depth: int) -> int:
        self._next.append({})
        self._fail.append(0)
        self.depth.append(depth)
        self.hit.append(-1)
        return len(self.depth) - 1

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        while state and byte not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(byte, 0)


@lru_cache(maxsize=64)
def _matcher(stops: tuple[bytes, ...]) -> StopMatcher:
    return StopMatcher(stops)


class TextStream:
    """Text of one generated sequence; get one from `Tokenizer.stream`. Not thread-safe.

    The texts of all `push` calls and of `finish`, joined, are the text of all ids decoded at once, up to the first stop
    string. The first is the one whose last byte comes first, however the bytes fall into tokens; of several that end
    together, the one that began first.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stops = tuple(stops)
        encoded = tuple(stop.encode() for stop in self._stops)
        self._matcher = _matcher(encoded) if encoded else None
        self._lengths = tuple(map(len, encoded))
        self._state = 0
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ended = False

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text that is now safe to send, stop string that was found or None). After a stop nothing more comes."""
        if self._ended:
            return "", None
        data = self._piece(token_id)
        if self._matcher is None:
            return self._decoder.decode(data), None
        buffer = self._held + data
        state = self._state
        for end, byte in enumerate(data, start=len(self._held) + 1):
            state = self._matcher.step(state, byte)
            hit = self._matcher.hit[state]
            if hit >= 0:
                self._ended = True
                text = self._decoder.decode(buffer[: end - self._lengths[hit]], final=True)
                return text, self._stops[hit]
        self._state = state
        safe = len(buffer) - self._matcher.depth[state]
        self._held = buffer[safe:]
        return self._decoder.decode(buffer[:safe]), None

    def finish(self) -> str:
        """What was held back, once no more tokens come; an unfinished character becomes U+FFFD."""
        if self._ended:
            return ""
        self._ended = True
        return self._decoder.decode(self._held, final=True)
