"""How much longer the steps of a `tokenizer.json` can make a text.

A few lines of JSON can ask for a text of terabytes: thirty replacements of "a" by "aa". The library does as it is told
and takes the process with it when memory runs out. So the growth is worked out before, from above.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

#: The sizes of UTF-8 at their worst; source: Unicode Technical Report 36, Maximum Expansion Factors.
_FACTORS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "BertNormalizer": 9, "ByteLevel": 3}
#: What a part may do that is not known here, as old files do not say what is what.
_UNKNOWN = 11
_NO_LONGER = (
    "Strip", "StripAccents", "Nmt", "Split", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation",
    "BertPreTokenizer", "CharDelimiterSplit", "FixedLength", "UnicodeScripts",
)  # fmt: skip
#: What these do is in their keys.
_KEYED = ("Replace", "Prepend", "Precompiled", "Metaspace")


class Growth(NamedTuple):
    """A text of n bytes becomes one of at most factor * n + extra."""

    factor: int
    extra: int

    def __call__(self, n_bytes: int) -> int:
        return self.factor * n_bytes + self.extra


class Damaged(ValueError):
    """A step that the library would read beyond its end."""


def growth(normalizer: Any, pre_tokenizer: Any) -> Growth:
    """Of both, one after the other. Raises Damaged for a character map whose sizes are wrong."""
    factor, extra = 1, 0
    for step in [*steps(normalizer, "normalizers"), *steps(pre_tokenizer, "pretokenizers")]:
        times, more = _step(step)
        factor, extra = factor * times, extra * times + more
    return Growth(factor, extra)


def replacing(pairs: Iterable[tuple[str, str]]) -> int:
    """The factor of plain replacements, each of `old` by `new`, one after the other."""
    factor = 1
    for old, new in pairs:
        factor *= max(1, -(-_size(new) // max(1, _size(old))))
    return factor


def steps(part: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """A pipeline's part as its steps; sequences, whose steps are under `key`, may hold sequences."""
    if not isinstance(part, dict):
        return
    inner = part.get(key)
    if isinstance(inner, list):
        for item in inner:
            yield from steps(item, key)
    elif part.get("type") != "Sequence":
        yield part


def _step(step: Mapping[str, Any]) -> Growth:
    """The most that any of its keys stands for: the library ignores those that its type does not have."""
    found = list(_keys(step))
    kind = step.get("type")
    if kind not in (*_NO_LONGER, *_KEYED) and (kind is not None or not found):
        found.append(Growth(_FACTORS.get(str(kind), _UNKNOWN), 1))
    return Growth(max((item.factor for item in found), default=1), max((item.extra for item in found), default=0))


def _keys(step: Mapping[str, Any]) -> Iterator[Growth]:
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)} if old:
            yield Growth(replacing([(old, new)]), 0)
        case {"content": str(new)}:  # a pattern may match nothing, between any two characters
            yield Growth(1 + _size(new), _size(new))
    match step:
        case {"prepend": str(new)}:
            yield Growth(1, _size(new))
    match step:
        case {"precompiled_charsmap": str(table)}:
            yield Growth(_longest(table), 0)
    match step:
        case {"replacement": str(new)}:  # Metaspace: instead of each space, and before each piece
            yield Growth(1 + 2 * _size(new), _size(new))


def _longest(table: str) -> int:
    """The longest text in a character map: the size of its index, the index, then texts that end in NUL."""
    try:
        data = base64.b64decode(table)
        start = 4 + struct.unpack_from("<I", data)[0]
    except (binascii.Error, ValueError, struct.error) as error:
        raise Damaged("its character map is cut off or not in base64") from error
    if start > len(data) or start % 4:  # the library would make room for it before it looks
        raise Damaged(f"its character map has an index of {start - 4} bytes, of {len(data)} in all")
    return max(map(len, data[start:].split(b"\0")), default=1) or 1


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))
