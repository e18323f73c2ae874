"""Builds .safetensors files for tests, sound ones and (through the arguments) unsound ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any


def build_safetensors(
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]] | None = None,
    *,
    header: Mapping[str, Any] | bytes | None = None,
    data: bytes | None = None,
    length: int | None = None,
    pad: int = 8,
) -> bytes:
    """tensors: name -> (dtype, shape, bytes), laid out in order. header, data and length replace what follows from
    them; pad: what the header's length is a multiple of."""
    entries: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, raw) in (tensors or {}).items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    head = header if isinstance(header, bytes) else json.dumps(entries if header is None else header).encode()
    head += b" " * (-len(head) % pad)
    return struct.pack("<Q", len(head) if length is None else length) + head + (body if data is None else data)
