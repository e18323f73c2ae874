"""Memory that vectors are loaded from and stored to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Bytes: a cache line, and the widest vector. An access that crosses a line costs two.
LINE = 64


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros that begins with a cache line, as NumPy's own do not; pages are taken when used."""
    return _from_line(np.zeros, shape, np.dtype(dtype))


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of whatever was there, which begins with a cache line."""
    return _from_line(np.empty, shape, np.dtype(dtype))


def _from_line(make: Callable[..., NDArray[Any]], shape: int | tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    n = kind.itemsize * math.prod((shape,) if isinstance(shape, int) else shape)
    memory = make(n + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + n].view(kind).reshape(shape)


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy of it that begins with a cache line; contiguous."""
    if array.ctypes.data % LINE == 0 and array.flags.c_contiguous:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy
