from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_BUILD = runpy.run_path(str(Path(__file__).parents[1] / "gguf_bytes.py"))["build_gguf"]


@pytest.fixture
def build_gguf() -> Callable[..., bytes]:
    """The bytes of a GGUF file: build_gguf(metadata, tensors, data, ...)."""
    return _BUILD  # type: ignore[no-any-return]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """The same, written to a file; or the bytes given, written as they are."""
    numbers = itertools.count()

    def write(*args: Any, **kwargs: Any) -> Path:
        path = tmp_path / f"{next(numbers)}.gguf"
        path.write_bytes(args[0] if args and isinstance(args[0], bytes) else _BUILD(*args, **kwargs))
        return path

    return write
