"""What the kinds of tokenizer have in common: ids of a text, bytes of an id."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miro_cy.text.specials import Special, Splitter

if TYPE_CHECKING:
    import tokenizers

# For batches of one the library needs no thread pool of its own. It reads this at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def encode_released(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """Token ids of a text, without special tokens of the library's adding.

    As a batch of one: in `encode` the library holds the GIL, and a long text would stall every other thread.
    """
    ids: list[int] = library.encode_batch([text], add_special_tokens=False)[0].ids
    return ids


@dataclass(frozen=True, slots=True)
class Leading:
    """What decoding takes off the beginning of a text, because encoding put it there.

    spaces: at most so many at the beginning. first_piece: all of those in the first piece, however many (the rule of
    Hugging Face's Metaspace decoder).
    """

    spaces: int = 0
    first_piece: bool = False

    def strip(self, piece: Callable[[int], bytes]) -> Callable[[int], bytes]:
        """`piece` for the ids of one text, in order, without what is to come off."""
        if not self.spaces and not self.first_piece:
            return piece
        left = self.spaces
        begun = False

        def stripped(token_id: int) -> bytes:
            nonlocal left, begun
            data = piece(token_id)
            if begun or not data:
                return data
            if self.first_piece:
                begun = True
                return data.replace(b" ", b"")
            kept = data.lstrip(b" ")
            taken = min(left, len(data) - len(kept))
            left -= taken
            data = data[taken:]
            begun = bool(data) or not left
            return data

        return stripped


class Codec(ABC):
    """One vocabulary. Immutable after construction; any number of threads may use it.

    vocab_size: entries. skipped: ids that stand for no text unless it is asked for. leading: see `Leading`.
    """

    vocab_size: int
    skipped: frozenset[int]
    leading: Leading = Leading()

    @abstractmethod
    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of a text that is valid Unicode. Raises BadField for what the vocabulary cannot express."""

    @abstractmethod
    def piece(self, index: int) -> bytes:
        """The bytes of the entry `index`, a special token's being its name."""


class SplittingCodec(Codec):
    """A codec that finds special tokens itself and leaves only plain text to its model."""

    def __init__(self, specials: Iterable[Special]) -> None:
        found = list(specials)
        self._all = Splitter(found)
        self._user = Splitter(special for special in found if not special.control)
        self.skipped = frozenset(special.id for special in found if special.control)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        first = True
        for part, special in (self._all if parse_special else self._user).split(text):
            if part:
                ids += self.encode_plain(part, first=first)
            if special is not None:
                ids.append(special.id)
            first = False
        return ids

    @abstractmethod
    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of a text that is not empty and holds no special token. first: nothing comes before it."""
