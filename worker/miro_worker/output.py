"""What one choice of a request has produced and its client has not got yet."""

from __future__ import annotations

from miro_client import wire
from miro_cy.requests import Event

TOKEN_BYTES = 4
#: What a log-probability with its id takes in memory while it waits: a tuple of an int and a float, and its place.
LOGPROB_BYTES = 120


def logprob_bytes(n_tokens: int, top: int) -> int:
    """What the log-probabilities of so many tokens, with as many alternatives each, count."""
    return LOGPROB_BYTES * n_tokens * (1 + top)


class Output:
    """Unsent output of one choice, gathered until it may leave.

    end: how the choice ends, once that is decided; it is sent after everything else. closed: its END was handed over.
    unsent_bytes: what the output takes in memory, about.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.end: wire.End | None = None
        self.closed = False
        self.unsent_bytes = 0
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[wire.Logprob] | None = None
        self._is_cut = False

    def absorb(self, event: Event) -> int:
        """Add what a step produced; returns what it takes in memory, about."""
        size = len(event.text) + TOKEN_BYTES * len(event.tokens)
        if event.text:
            self._text.append(event.text)
        self._tokens.extend(event.tokens)
        if event.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            for entry in event.logprobs:
                top = [(int(token), float(value)) for token, value in entry.top]
                self._logprobs.append((float(entry.logprob), top))
                size += logprob_bytes(1, len(top))
        self.unsent_bytes += size
        return size

    @property
    def has_pieces(self) -> bool:
        return bool(self._text or self._tokens)

    def drop_pieces(self) -> None:
        self._text, self._tokens, self._logprobs = [], [], None
        self.unsent_bytes = 0

    def chunk(self, sequence: int) -> wire.Chunk:
        """All of it, as the CHUNK of that number."""
        text, tokens = "".join(self._text), wire.pack_ids(self._tokens)
        return wire.Chunk(i=self.index, s=sequence, t=text, k=tokens, lp=self._logprobs or None)

    def put_whole(self) -> None:
        """All of it goes into the END."""
        if self.end is not None:
            self.end.t, self.end.k, self.end.lp = "".join(self._text), wire.pack_ids(self._tokens), self._logprobs
        self.drop_pieces()

    def decide(self, end: wire.End) -> None:
        """This is how it ends; but never as if it were whole when a part of it was cut out."""
        self.end = end
        if self._is_cut and end.reason != "error":
            end.reason, end.stop = "cancelled", None

    def cut(self) -> None:
        """Drop what could not leave, because the client has cancelled and takes no more."""
        self.drop_pieces()
        self._is_cut = True
        if self.end is not None:
            self.decide(self.end)
