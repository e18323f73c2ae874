"""Memory that vectors are loaded from and stored to."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Bytes: a cache line, and the widest vector. An access that crosses a line costs two.
LINE = 64
#: Bytes of a large page, on all systems that matter here.
LARGE_PAGE = 2 << 20


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


def in_lines(n: int) -> int:
    """Bytes of whole cache lines that hold n."""
    return -(-n // LINE) * LINE


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy of it that begins with a cache line; contiguous."""
    if array.ctypes.data % LINE == 0 and array.flags.c_contiguous:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


class Arena:
    """Room for arrays that are read over and over and end together: a model's weights, a KV pool.

    Where the system allows (transparent_hugepage: madvise or always), it is in large pages: a step that reads all
    weights once otherwise spends a tenth of its time on finding small ones. Memory is taken when used, and given back
    when the last array is gone.
    """

    def __init__(self, size: int) -> None:
        """size: bytes of all arrays together, each rounded up to a LINE."""
        memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # another system, or one without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % LARGE_PAGE
        self._rest = whole[start : start + size]

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of zeros that begins with a cache line. Raises ValueError when it does not fit."""
        kind = np.dtype(dtype)
        n = kind.itemsize * math.prod((shape,) if isinstance(shape, int) else shape)
        size = in_lines(n)
        if size > self._rest.size:
            raise ValueError(f"no room for {n} bytes in the {self._rest.size} that are left")
        taken, self._rest = self._rest[:n], self._rest[size:]
        return taken.view(kind).reshape(shape)
