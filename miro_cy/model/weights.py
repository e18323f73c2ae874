"""Loading a checkpoint: every tensor checked by name, shape and type, then packed once, its file pages released."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.weights import FORMATS, PackedWeights
from miro_cy.errors import ModelFormatError, UnsupportedModel
from miro_cy.formats.gguf import GGUFFile, TensorInfo
from miro_cy.model.gguf_llama import LAYER_BIASES, LAYER_TENSORS, MODEL_TENSORS, sizes
from miro_cy.model.spec import ModelSpec

Vector = NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer: matrices by role, norms and biases as float32 vectors (a missing bias is absent)."""

    matrices: dict[str, PackedWeights] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)


@dataclass(slots=True)
class Weights:
    """A model's weights; `output` is `embedding` itself where the two are tied."""

    embedding: PackedWeights
    output: PackedWeights
    output_norm: Vector
    layers: list[LayerWeights]

    def matrices(self) -> Iterator[PackedWeights]:
        """Every distinct packed matrix."""
        yield self.embedding
        if self.output is not self.embedding:
            yield self.output
        for layer in self.layers:
            yield from layer.matrices.values()

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.matrices())

    @property
    def quantised(self) -> bool:
        """True if any matrix is stored in fewer than 16 bits a value."""
        return any(not m.is_float for m in self.matrices())


class _Loader:
    def __init__(self, file: GGUFFile, spec: ModelSpec, threads: int, progress: Progress | None) -> None:
        self.file = file
        self.dims = sizes(spec)
        self.threads = threads
        self.progress = progress
        self.unread = set(file.tensors)

    def matrix(self, name: str, dims: tuple[str, ...]) -> PackedWeights:
        info = self.take(name, dims)
        n, k = info.shape
        if info.type.name not in FORMATS:
            known = ", ".join(FORMATS)
            raise UnsupportedModel(f"{self.file.path}: tensor {name} has type {info.type.name}; supported are {known}")
        packed = PackedWeights(self.file.data(name), info.type.name, n, k, self.threads)
        self.file.release(name)
        self.report()
        return packed

    def vector(self, name: str, dims: tuple[str, ...]) -> Vector:
        info = self.take(name, dims)
        kind = {"F32": np.float32, "F16": np.float16}.get(info.type.name)
        if kind is None:
            raise UnsupportedModel(f"{self.file.path}: tensor {name} has type {info.type.name}; supported are F32, F16")
        values = self.file.data(name).view(kind).astype(np.float32)
        self.report()
        return values

    def take(self, name: str, dims: tuple[str, ...]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.file.path}: tensor {name} is missing")
        want = tuple(self.dims[d] for d in dims)
        if info.shape != want:
            raise ModelFormatError(f"{self.file.path}: tensor {name} has shape {info.shape}, expected {want}")
        self.unread.discard(name)
        return info

    def report(self) -> None:
        if self.progress is not None:
            self.progress(len(self.file.tensors) - len(self.unread), len(self.file.tensors))

    def layer(self, index: int) -> LayerWeights:
        weights = LayerWeights()
        for role, (name, dims) in LAYER_TENSORS.items():
            full = f"blk.{index}.{name}"
            if len(dims) == 2:
                weights.matrices[role] = self.matrix(full, dims)
            else:
                weights.vectors[role] = self.vector(full, dims)
        for role, (name, dims) in LAYER_BIASES.items():
            full = f"blk.{index}.{name}"
            if full in self.file.tensors:
                weights.vectors[role] = self.vector(full, dims)
        return weights


def load_weights(file: GGUFFile, spec: ModelSpec, *, threads: int = 1, progress: Progress | None = None) -> Weights:
    """Pack all tensors of a llama GGUF file; memory beyond the packed form stays under one tensor.

    progress(done, total) counts tensors. Raises ModelFormatError naming a missing, extra or misshapen tensor, and
    UnsupportedModel naming a tensor of a type that has no packed layout.
    """
    loader = _Loader(file, spec, threads, progress)
    embedding = loader.matrix(*MODEL_TENSORS["embedding"])
    output = embedding if spec.tied_output else loader.matrix(*MODEL_TENSORS["output"])
    norm = loader.vector(*MODEL_TENSORS["output_norm"])
    layers = [loader.layer(i) for i in range(spec.n_layers)]
    if loader.unread:
        raise ModelFormatError(f"{file.path}: tensor {min(loader.unread)} is not part of a {spec.architecture} model")
    return Weights(embedding, output, norm, layers)
