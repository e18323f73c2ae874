"""Builds GGUF files for tests, sound ones and (through the arguments) unsound ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

SCALARS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """(kind, number) of SCALARS, str, bool, int (u32), float (f32), list, or bytes: a type and value as they are."""
    if isinstance(item, bytes):
        return item
    kind, body = _typed(item)
    return struct.pack("<I", kind) + body


def _typed(item: Any) -> tuple[int, bytes]:
    if isinstance(item, tuple):
        kind, code = SCALARS[item[0]]
        return kind, struct.pack("<" + code, item[1])
    if isinstance(item, str):
        return 8, string(item)
    if isinstance(item, bool):
        return _typed(("bool", item))
    if isinstance(item, int):
        return _typed(("u32" if item >= 0 else "i32", item))
    if isinstance(item, float):
        return _typed(("f32", item))
    parts = [_typed(part) for part in item]
    kind = parts[0][0] if parts else 4
    return 9, struct.pack("<IQ", kind, len(parts)) + b"".join(body for _, body in parts)


def build_gguf(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    tensors: Sequence[tuple[str, Sequence[int], int, int]] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A GGUF file. tensors: (name, dims with the fastest first, type id, offset into the data)."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    out = magic + struct.pack(
        "<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    )
    for key, item in pairs:
        out += string(key) + value(item)
    for name, dims, kind, offset in tensors:
        out += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    if tensors:
        out += bytes(-len(out) % alignment)
    return out + data
