"""Reading a GGUF header with every length checked before it is used (format: ggml/docs/gguf.md, versions 2 and 3)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from mmap import mmap
from typing import Any, NoReturn

import numpy as np

from miro_cy.errors import ModelError, ModelFormatError
from miro_cy.formats.mapped import release_pages

MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 256
MAX_ARRAY_DEPTH = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}


class Cursor:
    """A position in the mapped file. Every read names what it reads and fails before it would leave the file."""

    def __init__(self, data: mmap, label: str) -> None:
        self.data = data
        self.size = len(data)
        self.pos = 0
        self.label = label

    def fail(self, message: str) -> NoReturn:
        raise ModelFormatError(f"{self.label}: {message}")

    def need(self, n_bytes: int, what: str) -> int:
        """Step over n_bytes; returns where they begin."""
        start = self.pos
        if n_bytes > self.size - start:
            self.fail(
                f"{what} needs {n_bytes} bytes at offset {start}, but the file has only {self.size - start} bytes left"
            )
        self.pos = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.need(8, what))[0]
        return value

    def count(self, what: str, item_bytes: int) -> int:
        """A count of items that take at least item_bytes each, so that it is bounded by what is left of the file."""
        n = self.u64(what)
        left = self.size - self.pos
        if n * item_bytes > left:
            self.fail(f"{what} is {n}, but the {left} bytes left in the file hold at most {left // item_bytes}")
        return n

    def text(self, what: str, limit: int) -> str:
        length = self.u64(f"length of {what}")
        if length > limit:
            self.fail(f"{what} is {length} bytes long; the limit is {limit}")
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def value(self, key: str) -> Any:
        """A metadata value: scalars decoded, strings and arrays left in the file as `Deferred`."""
        kind = self.u32(f"type of {key}")
        start = self.pos
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            number = scalar.unpack_from(self.data, self.need(scalar.size, f"value of {key}"))[0]
            return self._bool(number, key) if kind == _BOOL else number
        if kind == _STRING:
            self._skip_strings(1, key)
        elif kind == _ARRAY:
            self._skip_array(key, 1)
        else:
            self.fail(f"{key} has the unknown value type {kind}")
        return Deferred(kind, start)

    def _bool(self, number: int, key: str) -> bool:
        if number > 1:
            self.fail(f"{key} is a bool with the value {number}; it must be 0 or 1")
        return number == 1

    def _skip_strings(self, count: int, key: str) -> None:
        # The hot loop of opening a file (two arrays as long as the vocabulary), hence not `need` for each string.
        data, size, pos, unpack = self.data, self.size, self.pos, _U64.unpack_from
        for i in range(count):
            if size - pos < 8:
                self.fail(f"{key}: the file ends before string {i} of {count}")
            pos += 8 + unpack(data, pos)[0]
            if pos > size:
                self.fail(f"{key}: string {i} of {count} is longer than the file")
        self.pos = pos

    def array_head(self, key: str) -> tuple[int, int]:
        """(element type, count) of an array; the count is bounded by the file."""
        kind = self.u32(f"element type of {key}")
        if kind in _SCALARS:
            return kind, self.count(f"length of {key}", _SCALARS[kind].size)
        if kind == _STRING:
            return kind, self.count(f"length of {key}", 8)
        if kind != _ARRAY:
            self.fail(f"{key} is an array of the unknown value type {kind}")
        return kind, self.count(f"length of {key}", 12)

    def _skip_array(self, key: str, depth: int) -> None:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{key} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind, count = self.array_head(key)
        if kind == _STRING:
            self._skip_strings(count, key)
        elif kind == _ARRAY:
            for _ in range(count):
                self._skip_array(key, depth + 1)
        else:
            self.need(count * _SCALARS[kind].size, key)

    def decode(self, kind: int, key: str) -> Any:
        """The string or array at the cursor, whose extent `value` has checked."""
        if kind == _STRING:
            return self._strings(1, key)[0]
        kind, count = self.array_head(key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind == _ARRAY:
            return [self.decode(_ARRAY, key) for _ in range(count)]
        start = self.need(count * _SCALARS[kind].size, key)
        numbers = np.frombuffer(self.data[start : self.pos], dtype=_DTYPES[kind])
        if kind == _BOOL:
            if count and numbers.max() > 1:
                self.fail(f"{key} holds a bool that is neither 0 nor 1")
            numbers = numbers.view(np.bool_)
        return numbers

    def _strings(self, count: int, key: str) -> list[str]:
        begin = self.pos
        self._skip_strings(count, key)
        chunk = self.data[begin : self.pos]
        out: list[str] = []
        pos, unpack = 0, _U64.unpack_from
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(chunk, pos)[0]
                out.append(chunk[start:pos].decode())
        except UnicodeDecodeError:
            self.fail(f"{key}: string {len(out)} is not valid UTF-8")
        return out


class Deferred:
    """A string or array still in the file."""

    __slots__ = ("kind", "pos")

    def __init__(self, kind: int, pos: int) -> None:
        self.kind = kind
        self.pos = pos


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a GGUF file.

    Integers, floats and bools are Python's; strings are str. Arrays are decoded at each reading, as a vocabulary is not
    to stay in memory for the sake of who might ask again: numbers to a read-only NumPy array, strings and nested arrays
    to a list. Raises ModelFormatError for a string that is not UTF-8. After the file was closed, ModelError when an
    array is asked for, or a string that was never read.
    """

    def __init__(self, cursor: Cursor, n_pairs: int) -> None:
        self._cursor = cursor
        self._values: dict[str, Any] = {}
        for i in range(n_pairs):
            key = cursor.text(f"metadata key {i}", MAX_KEY_BYTES)
            if key in self._values:
                cursor.fail(f"metadata key {key!r:.100} appears twice")
            self._values[key] = cursor.value(_label(key))

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Deferred):
            if self._cursor.data.closed:
                raise ModelError(f"{self._cursor.label} is closed; metadata key {key!r:.100} can no longer be read")
            # A cursor of its own: two threads may read at once.
            cursor = Cursor(self._cursor.data, self._cursor.label)
            cursor.pos = value.pos
            decoded = cursor.decode(value.kind, _label(key))
            if value.kind == _STRING:
                self._values[key] = decoded
            else:
                release_pages(cursor.data, value.pos, cursor.pos)
            return decoded
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _label(key: str) -> str:
    return f"metadata key {key!r:.100}"


def describe(value: Any) -> str:
    """What a metadata value is, for error messages."""
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, str):
        return f"the string {value!r:.60}"
    if isinstance(value, (list, np.ndarray)):
        return f"an array of {len(value)}"
    return f"the number {value!r}"
