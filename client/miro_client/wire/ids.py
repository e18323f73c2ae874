"""Token ids on the wire."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from miro_client.errors import BadField


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32, little-endian. Raises BadField when one does not fit."""
    try:
        packed = array("i", ids)
    except Exception:  # no integer, one that does not fit, or whatever an __index__ of somebody else's raises
        raise BadField("token ids must be 32-bit integers", field="tokens") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of pack_ids. Raises BadField when the length is not a multiple of 4."""
    if len(data) % 4:
        raise BadField(f"token ids take 4 bytes each, got {len(data)} bytes", field="tokens")
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
