"""The small files around a tokenizer in a Hugging Face folder, read with a limit on everything."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miro_client.checks import shown
from miro_cy.errors import ModelFormatError, ModelNotFound

MAX_JSON_BYTES = 16 * 2**20
#: Entries of a vocabulary, and the highest id.
MAX_TOKENS = 2**22


def read_bytes(path: Path, limit: int) -> bytes:
    """Raises ModelNotFound for what cannot be read, ModelFormatError beyond `limit` bytes or for what is no file."""
    try:
        info = path.stat()  # before opening, as opening a named pipe would wait for its writer
        if not stat.S_ISREG(info.st_mode):
            raise ModelFormatError(f"{path} is not a file")
        if info.st_size > limit:
            raise ModelFormatError(f"{path} has {info.st_size} bytes; the limit is {limit}")
        with open(path, "rb") as file:
            return file.read(info.st_size)
    except OSError as error:
        raise ModelNotFound(f"cannot open {path}: {error.strerror}") from None


def read_text(path: Path, limit: int) -> str:
    """UTF-8 text; line ends become "\\n". Raises as `read_bytes` does."""
    try:
        return read_bytes(path, limit).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} is not UTF-8: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one when there is no such file. Raises ModelFormatError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object")
    return value


def typed(source: Mapping[str, Any], key: str, kind: type[Any], label: str, default: Any = None) -> Any:
    """source[key], or `default` when it is absent or null. Raises ModelFormatError when it is of another type."""
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ModelFormatError(f"{label}: {key!r} must be {kind.__name__}, not {shown(value)}")
    return value
