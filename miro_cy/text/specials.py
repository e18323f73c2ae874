"""Tokens that are found in a text before anything else is: control tokens and user-defined ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: Longer ones are not looked for: no real token comes near, and the search costs their lengths at each position.
MAX_SPECIAL_CHARS = 256
#: Unicode's White_Space, what a token that strips takes with it. (Python's str.strip knows four characters more.)
WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True, slots=True)
class Special:
    """One such token. control: text may be asked to spell it without meaning it, and output leaves it out.

    lstrip, rstrip: the white space before, after it belongs to it (Hugging Face's flags of added tokens).
    """

    text: str
    id: int
    control: bool
    lstrip: bool = False
    rstrip: bool = False


class Splitter:
    """Cuts texts at special tokens: the leftmost first, then the longest."""

    def __init__(self, specials: Iterable[Special]) -> None:
        self._known: dict[str, Special] = {}
        lengths: dict[str, set[int]] = defaultdict(set)
        for special in specials:
            if 0 < len(special.text) <= MAX_SPECIAL_CHARS:
                self._known.setdefault(special.text, special)
                lengths[special.text[0]].add(len(special.text))
        self._lengths = {char: sorted(found, reverse=True) for char, found in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[tuple[str, Special | None]]:
        """(text before it, special token), ..., (text after the last, None). Texts may be empty."""
        start = position = 0
        last: Special | None = None
        while self._first is not None and (candidate := self._first.search(text, position)):
            position = candidate.start()
            found = self._at(text, position)
            if found is None:
                position += 1
                continue
            yield _strip(text[start:position], last, found), found
            start = position = position + len(found.text)
            last = found
        yield _strip(text[start:], last, None), None

    def _at(self, text: str, position: int) -> Special | None:
        for length in self._lengths[text[position]]:
            found = self._known.get(text[position : position + length])
            if found is not None:
                return found
        return None


def _strip(text: str, before: Special | None, after: Special | None) -> str:
    if before is not None and before.rstrip:
        text = text.lstrip(WHITE_SPACE)
    if after is not None and after.lstrip:
        text = text.rstrip(WHITE_SPACE)
    return text
