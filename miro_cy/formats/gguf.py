"""GGUF files, versions 2 and 3: metadata and tensors over a memory map, nothing copied, everything checked.

Opening a file reads its header only. All arithmetic on sizes is done in Python integers, which do not overflow, and
each number is compared with the file's size before anything is allocated for it: a hostile file of a few bytes costs
neither memory nor time. Truncating a file that is open ends the process, as with any memory map.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from miro_cy.errors import ModelError, ModelFormatError, UnsupportedModel
from miro_cy.formats.ggml_types import BY_ID, GGMLType
from miro_cy.formats.gguf_header import MAX_NAME_BYTES, Cursor, Metadata, describe
from miro_cy.formats.mapped import close_map, map_file, release_pages

MAX_DIMS = 4
MIN_ALIGNMENT, MAX_ALIGNMENT, DEFAULT_ALIGNMENT = 8, 2**20, 32
_MIN_HEADER = 24
_MIN_PAIR = 13  # an empty key, a type and one byte
_MIN_TENSOR = 32  # an empty name, one dimension, a type and an offset

T = TypeVar("T", int, float, bool, str, list, np.ndarray)
D = TypeVar("D")
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major (rows, columns); `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int

    @property
    def kind(self) -> str:
        """The type's name."""
        return self.type.name


class GGUFFile:
    """An open GGUF file; a context manager.

    Raises ModelNotFound when the file is missing or cannot be opened, ModelFormatError when it is damaged or
    inconsistent, UnsupportedModel for a version, byte order or tensor type that miro cannot read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = map_file(self.path, _MIN_HEADER, "GGUF file")
        self._closed = False
        try:
            cursor = Cursor(self._map, str(self.path))
            self.version = _version(cursor)
            n_tensors = cursor.count("number of tensors", _MIN_TENSOR)
            n_pairs = cursor.count("number of metadata pairs", _MIN_PAIR)
            self._metadata = Metadata(cursor, n_pairs)
            self.tensors: dict[str, TensorInfo] = self._read_tensors(cursor, n_tensors)
            release_pages(self._map, 0, cursor.pos)  # megabytes of vocabulary that weights alone do not need
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> tuple[Path, ...]:
        """The file itself: a model in one piece."""
        return (self.path,)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's key-value pairs; see `Metadata` for the types."""
        return self._metadata

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...
    def get(self, key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
        """The value of `key` as int, float, bool, str, list or np.ndarray (of numbers).

        An integer serves as a float; nothing else is converted. Raises ModelFormatError naming the key when it is of
        another kind, or when it is absent and there is no default.
        """
        if key not in self._metadata:
            if default is _REQUIRED:
                raise ModelFormatError(f"{self.path}: metadata key {key!r} is missing")
            return default
        value = self._metadata[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is list and isinstance(value, np.ndarray):
            return value.tolist()
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFormatError(f"{self.path}: metadata key {key!r} must be {kind.__name__}, not {describe(value)}")
        return value

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a read-only uint8 view [nbytes] of the map.

        Raises ModelFormatError for an unknown name, ModelError after `close`.
        """
        info = self._info(name)
        return np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def release(self, name: str) -> None:
        """Give the memory of the tensor's whole pages back; reading it again fetches them from the file."""
        info = self._info(name)
        release_pages(self._map, info.offset, info.offset + info.nbytes)

    def close(self) -> None:
        """Close the file. Views handed out by `data` stay valid: the map goes when the last of them does."""
        self._closed = True
        close_map(self._map)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if self._closed:
            raise ModelError(f"{self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.path}: tensor {name!r:.100} is missing")
        return info

    def _read_tensors(self, cursor: Cursor, n_tensors: int) -> dict[str, TensorInfo]:
        alignment = self.get("general.alignment", int, DEFAULT_ALIGNMENT)
        if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            cursor.fail(
                f"general.alignment must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, not {alignment}"
            )
        heads = [_tensor_head(cursor, i) for i in range(n_tensors)]
        base = -(-cursor.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in heads:
            if name in tensors:
                cursor.fail(f"tensor name {name!r:.100} appears twice")
            if offset % alignment:
                cursor.fail(f"tensor {name!r:.100} is at {offset}, not a multiple of the alignment {alignment}")
            nbytes = _nbytes(shape, kind)
            if base + offset + nbytes > cursor.size:
                cursor.fail(
                    f"tensor {name!r:.100} takes {nbytes} bytes at offset {base + offset}, "
                    f"but the file ends at {cursor.size}"
                )
            tensors[name] = TensorInfo(name, shape, kind, base + offset, nbytes)
        end, owner = 0, ""
        for info in sorted(tensors.values(), key=lambda item: item.offset):
            if info.offset < end:
                cursor.fail(f"tensors {owner!r:.100} and {info.name!r:.100} overlap")
            end, owner = info.offset + info.nbytes, info.name
        return tensors


def _version(cursor: Cursor) -> int:
    magic = cursor.data[cursor.need(4, "magic") : cursor.pos]
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file (it begins with {magic!r})")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version and not version & 0xFFFF:
        raise UnsupportedModel(f"{cursor.label}: a big-endian GGUF file; only little-endian ones are supported")
    raise UnsupportedModel(f"{cursor.label}: GGUF version {version} is not supported; versions 2 and 3 are")


def _tensor_head(cursor: Cursor, index: int) -> tuple[str, tuple[int, ...], GGMLType, int]:
    name = cursor.text(f"name of tensor {index}", MAX_NAME_BYTES)
    label = f"tensor {name!r:.100}"
    n_dims = cursor.u32(f"number of dimensions of {label}")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"{label} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = [cursor.u64(f"dimensions of {label}") for _ in range(n_dims)]
    type_id = cursor.u32(f"type of {label}")
    kind = BY_ID.get(type_id)
    if kind is None:
        raise UnsupportedModel(f"{cursor.label}: {label} has the unknown type id {type_id}")
    if 0 in dims:
        cursor.fail(f"{label} has a dimension of 0")
    if dims[0] % kind.block:
        cursor.fail(f"{label} has rows of {dims[0]} elements, not a multiple of the {kind.name} block of {kind.block}")
    # The file lists the fastest-varying dimension first.
    return name, tuple(reversed(dims)), kind, cursor.u64(f"offset of {label}")


def _nbytes(shape: tuple[int, ...], kind: GGMLType) -> int:
    n = kind.block_bytes
    for dim in shape[:-1]:
        n *= dim
    return n * (shape[-1] // kind.block)
