"""Safetensors: one file, or the folder of files that Hugging Face checkpoints are.

The `safetensors` library reads and validates a header; the bytes come from a map of our own, as its NumPy loader
refuses bfloat16. Where each tensor lies is checked here once more against the file as it was mapped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from miro_cy.errors import ModelError, ModelFormatError, ModelNotFound, UnsupportedModel
from miro_cy.formats.mapped import close_map, map_file, parse_json, read_json, release_pages

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Bytes an element takes. Of these only F32, F16 and BF16 can be weights; the others are refused by name when loaded.
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies; `offset` counts bytes from the start of its file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open .safetensors file.

    Raises ModelNotFound when it is missing or cannot be opened, ModelFormatError when it is damaged or inconsistent,
    UnsupportedModel for an element type that has no size here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, 8, "safetensors file")
        self._closed = False
        try:
            self.tensors: dict[str, StoredTensor] = self._read_header()
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a read-only view of the map, or a copy where the file does not align the elements."""
        info = self._info(name)
        view = np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return view.copy() if info.offset % ELEMENT_BYTES[info.kind] else view

    def release(self, name: str) -> None:
        info = self._info(name)
        release_pages(self._map, info.offset, info.offset + info.nbytes)

    def close(self) -> None:
        """Close the file. Views handed out by `data` stay valid: the map goes when the last of them does."""
        self._closed = True
        close_map(self._map)

    def _info(self, name: str) -> StoredTensor:
        if self._closed:
            raise ModelError(f"{self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.path}: tensor {name!r:.100} is missing")
        return info

    def _read_header(self) -> dict[str, StoredTensor]:
        try:
            with safe_open(self.path, framework="np") as library:
                listed = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118  (not a mapping)
                types = {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in listed.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFormatError(f"{self.path}: not a sound safetensors file ({error!s:.200})") from None
        header, base = self._offsets()
        tensors = {name: self._entry(name, kind, shape, header, base) for name, (kind, shape) in types.items()}
        end, owner = base, ""
        for info in sorted(tensors.values(), key=lambda item: (item.offset, item.nbytes)):
            if info.offset < end:
                raise ModelFormatError(f"{self.path}: tensors {owner!r:.100} and {info.name!r:.100} overlap")
            end, owner = info.offset + info.nbytes, info.name
        return tensors

    def _offsets(self) -> tuple[dict[str, Any], int]:
        """The header's object, and where the tensors' bytes begin. The library, which has just read it, hides both."""
        length = struct.unpack_from("<Q", self._map)[0]
        if length > len(self._map) - 8:
            raise ModelFormatError(f"{self.path}: the header takes {length} bytes, the file has {len(self._map)}")
        return parse_json(self._map[8 : 8 + length], f"{self.path}: the header"), 8 + length

    def _entry(self, name: str, kind: str, shape: tuple[int, ...], header: dict[str, Any], base: int) -> StoredTensor:
        label = f"{self.path}: tensor {name!r:.100}"
        if kind not in ELEMENT_BYTES:
            raise UnsupportedModel(f"{label} has the type {kind}, which is not supported")
        match header.get(name):
            case {"data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise ModelFormatError(f"{label} has no place in the file")
        if not 0 <= begin <= end <= len(self._map) - base:
            raise ModelFormatError(f"{label} lies at {begin} to {end} of {len(self._map) - base} bytes")
        nbytes = prod(shape) * ELEMENT_BYTES[kind]
        if end - begin != nbytes:
            raise ModelFormatError(f"{label} has {end - begin} bytes, {kind} of shape {shape} takes {nbytes}")
        return StoredTensor(name, shape, kind, base + begin, nbytes)


class SafetensorsFolder:
    """The .safetensors files of a folder: model.safetensors, or those an index names, or the only one there is.

    Raises as SafetensorsFile does, and ModelFormatError when the index and the files disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._homes: dict[str, SafetensorsFile] = {}
        self._opened: list[SafetensorsFile] = []
        self._index: Path | None = None
        try:
            for path, names in self._shards().items():
                self._add(path, names)
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> tuple[Path, ...]:
        index = () if self._index is None else (self._index,)
        return (*index, *(file.path for file in self._opened))

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: file.tensors[name] for name, file in self._homes.items()}

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return self._home(name).data(name)

    def release(self, name: str) -> None:
        self._home(name).release(name)

    def close(self) -> None:
        for file in self._opened:
            file.close()

    def _home(self, name: str) -> SafetensorsFile:
        if name not in self._homes:
            raise ModelFormatError(f"{self.path}: tensor {name!r:.100} is missing")
        return self._homes[name]

    def _shards(self) -> dict[Path, set[str] | None]:
        """The files, each with the names of the tensors that the index puts there (None: all there are)."""
        if (self.path / SINGLE).is_file():
            return {self.path / SINGLE: None}
        if (self.path / INDEX).is_file():
            self._index = self.path / INDEX
            return self._indexed(self._index)
        found = safetensors_in(self.path)
        if not found:
            raise ModelNotFound(f"{self.path} holds no .safetensors file")
        if len(found) > 1:
            raise ModelFormatError(f"{self.path} holds {len(found)} .safetensors files and no {INDEX}")
        return {found[0]: None}

    def _indexed(self, index: Path) -> dict[Path, set[str] | None]:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelFormatError(f"{index}: weight_map must be an object that is not empty")
        shards: dict[Path, set[str] | None] = {}
        for name, file in places.items():
            # A name and nothing else: an index must not lead out of its folder.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ModelFormatError(f"{index}: tensor {name!r:.100} is in {file!r:.100}, no .safetensors file here")
            names = shards.setdefault(self.path / file, set())
            if names is not None:
                names.add(name)
        return shards

    def _add(self, path: Path, names: set[str] | None) -> None:
        file = SafetensorsFile(path)
        self._opened.append(file)
        if names is not None and (stray := names ^ set(file.tensors)):
            name = min(stray)
            where = "the index says it is there" if name in names else "the index does not know it"
            problem = "is missing" if name in names else "is extra"
            raise ModelFormatError(f"{path}: tensor {name!r:.100} {problem}: {where}")
        self._homes |= dict.fromkeys(file.tensors, file)


def safetensors_in(folder: Path) -> list[Path]:
    """The .safetensors files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())
