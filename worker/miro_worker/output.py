"""What one choice of a request has produced and its client has not got yet."""

from __future__ import annotations

from miro_client import wire
from miro_client.results import TokenLogprob
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
        self._tokens = bytearray()  # as they travel
        self._logprobs: list[wire.Logprob] | None = None
        self._is_cut = False

    def absorb(self, event: Event) -> int:
        """Add what a step produced; returns what it takes in memory, about.

        Raises some error, and adds nothing, for what cannot travel: that has to show now, not when it leaves.
        """
        tokens = wire.pack_ids(event.tokens)
        logprobs = [_plain(entry) for entry in event.logprobs or ()]
        size = len(event.text.encode()) + len(tokens) + sum(logprob_bytes(1, len(top)) for _, top in logprobs)
        if event.text:
            self._text.append(event.text)
        self._tokens += tokens
        if event.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += logprobs
        self.unsent_bytes += size
        return size

    @property
    def has_pieces(self) -> bool:
        return bool(self._text or self._tokens)

    def drop_pieces(self) -> None:
        self._text, self._tokens, self._logprobs = [], bytearray(), None
        self.unsent_bytes = 0

    def chunk(self, sequence: int) -> wire.Chunk:
        """All of it, as the CHUNK of that number."""
        text, tokens = "".join(self._text), bytes(self._tokens)
        return wire.Chunk(i=self.index, s=sequence, t=text, k=tokens, lp=self._logprobs or None)

    def put_whole(self) -> None:
        """All of it goes into the END."""
        if self.end is not None:
            self.end.t, self.end.k, self.end.lp = "".join(self._text), bytes(self._tokens), self._logprobs
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


def _plain(entry: TokenLogprob) -> wire.Logprob:
    """A token's log-probabilities as the wire takes them, whatever kinds of numbers they are."""
    return float(entry.logprob), [(int(token), float(value)) for token, value in entry.top]
