"""Opening what a model consists of: whole files as read-only maps, small JSON files as objects; all failures typed."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from miro_cy.errors import ModelFormatError, ModelNotFound

#: The largest JSON file that is read: an index of a million tensors fits.
MAX_JSON_BYTES = 1 << 26


def map_file(path: Path, least: int, kind: str) -> mmap.mmap:
    """A read-only map of a file of at least `least` bytes; `kind` is what it should be, as in "GGUF file".

    Raises ModelNotFound when it is missing or cannot be opened, ModelFormatError when it is no file or too short.
    """
    try:
        _require_file(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < least:
                raise ModelFormatError(f"{path}: {size} bytes are too few for a {kind}")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"no such model file: {path}") from None
    except ValueError as error:  # a NUL in the path; a file that shrank in between
        raise ModelNotFound(f"cannot open {str(path)!r}: {error}") from None
    except OSError as error:
        raise ModelNotFound(f"cannot open {path}: {error.strerror}") from None


def close_map(mapped: mmap.mmap) -> None:
    """Close a map, or leave that to the last array that still shows a part of it."""
    with contextlib.suppress(BufferError):
        mapped.close()


def release_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Give the memory of the whole pages inside [start, end) back; reading them again fetches them from the file."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelNotFound and ModelFormatError as `map_file` does."""
    try:
        _require_file(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, MAX_JSON_BYTES))  # not the limit: `read` allocates what it is asked for
    except FileNotFoundError:
        raise ModelNotFound(f"no such model file: {path}") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot open {str(path)!r}: {error}") from None
    if size > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    return parse_json(data, str(path))


def parse_json(data: bytes, label: str) -> dict[str, Any]:
    """The JSON object that these bytes are. Raises ModelFormatError, beginning with the label, when they are not."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{label} is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{label} must hold a JSON object")
    return value


def _require_file(path: Path) -> None:
    # Asked before opening, as opening a named pipe would wait for its writer.
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ModelFormatError(f"{path} is not a file" + (" but a folder" if stat.S_ISDIR(mode) else ""))
