"""The entries of a msgpack map, still encoded, whatever they hold.

msgspec skips a value by recursion, and what lies deeper than the interpreter's limit, which counts the frames of the
caller too, it can neither skip nor name. Where it gives up, the map is walked here with a stack of our own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

#: Entries of a map that is taken apart.
MAX_ENTRIES = 256
#: Values that are walked in Python, on a thread that others wait for.
MAX_WALKED = 20_000

_RAW = msgspec.msgpack.Decoder(Annotated[dict[str, Raw], Meta(max_length=MAX_ENTRIES)])
_KEY = msgspec.msgpack.Decoder(str)
#: First byte -> bytes of the count or length that follows it, bytes beside those counted, values an element has.
_SIZED: dict[int, tuple[int, int, int]] = {
    0xC4: (1, 0, 0), 0xC5: (2, 0, 0), 0xC6: (4, 0, 0),  # bin
    0xC7: (1, 1, 0), 0xC8: (2, 1, 0), 0xC9: (4, 1, 0),  # ext, with its type
    0xD9: (1, 0, 0), 0xDA: (2, 0, 0), 0xDB: (4, 0, 0),  # str
    0xDC: (2, 0, 1), 0xDD: (4, 0, 1),  # array
    0xDE: (2, 0, 2), 0xDF: (4, 0, 2),  # map
}  # fmt: skip
#: First byte -> bytes that follow it: nil and booleans, floats, integers, fixext.
_FIXED: dict[int, int] = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip


def entries(data: bytes | Raw) -> dict[str, Raw]:
    """Key -> value as it stands, at most MAX_ENTRIES. Raises msgspec.DecodeError when it is no such map, or one that
    only a walk over more than MAX_WALKED values could take apart.
    """
    try:
        return _RAW.decode(data)
    except RecursionError:
        return _Walk(bytes(data)).entries()


class _Walk:
    """A place in encoded data, and how many values may still be passed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._left = MAX_WALKED

    def entries(self) -> dict[str, Raw]:
        found: dict[str, Raw] = {}
        first = self._data[0] if self._data else 0
        is_map = first in (0xDE, 0xDF) or 0x80 <= first < 0x90
        count = self._step() // 2
        if not is_map or count > MAX_ENTRIES:
            raise msgspec.ValidationError(f"Expected a map of at most {MAX_ENTRIES} keys")
        for _ in range(count):
            key = _KEY.decode(self._value())
            found[key] = Raw(self._value())
        if self._at != len(self._data):
            raise msgspec.DecodeError("bytes after the map")
        return found

    def _value(self) -> bytes:
        """Pass one value and all that it holds."""
        start, waiting = self._at, 1
        while waiting:
            waiting += self._step() - 1
        return self._data[start : self._at]

    def _step(self) -> int:
        """Pass the head of a value, with its bytes if it has any; how many values it holds."""
        self._left -= 1
        if self._left < 0 or self._at >= len(self._data):
            raise msgspec.DecodeError("too many values to walk" if self._left < 0 else "truncated")
        first = self._data[self._at]
        self._at += 1
        held = size = 0
        if 0x80 <= first < 0xA0:
            held = (first & 15) * (2 if first < 0x90 else 1)
        elif 0xA0 <= first < 0xC0:
            size = first & 31
        elif first in _SIZED:
            width, beside, each = _SIZED[first]
            counted = int.from_bytes(self._data[self._at : self._at + width], "big")
            size = width + beside + (0 if each else counted)
            held = counted * each
        elif 0xC0 <= first < 0xE0:
            if first not in _FIXED:
                raise msgspec.DecodeError(f"no value begins with 0x{first:02x}")
            size = _FIXED[first]
        self._at += size
        if self._at > len(self._data):
            raise msgspec.DecodeError("truncated")
        return held
