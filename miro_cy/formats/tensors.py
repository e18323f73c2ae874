"""What every kind of model file gives: tensors by name, their bytes, and a way to give the memory back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TensorEntry(Protocol):
    """A tensor as its file lists it. `shape` is row-major; `kind` names the element type: "F32", "BF16", "Q4_0", ..."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class TensorSource(Protocol):
    """One open model file, or several that belong together."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file the model is made of."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Checked: each one's bytes lie inside its file, overlap no other's, and are as many as shape and type say."""

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, read-only uint8 [nbytes], not copied."""

    def release(self, name: str) -> None:
        """Give the memory of a tensor's pages back; reading it again fetches them from the file."""

    def close(self) -> None: ...
