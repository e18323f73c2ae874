"""Loading a checkpoint: every tensor checked by name, shape and type, then packed once, its file pages released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from miro_cy._kernels.memory import Arena, aligned
from miro_cy._kernels.weights import FORMATS, PackedWeights, buffer_nbytes
from miro_cy.errors import UnsupportedModel
from miro_cy.model.checkpoint import Checkpoint, Part

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


def _arena(parts: Sequence[Part]) -> Arena:
    """Room for all matrices."""
    return Arena(sum(buffer_nbytes(part.tensor.kind, *part.tensor.shape) for part in parts if part.is_matrix))


def _matrix(checkpoint: Checkpoint, part: Part, threads: int, arena: Arena) -> PackedWeights:
    n, k = part.tensor.shape
    packed = PackedWeights(checkpoint.data(part), part.tensor.kind, n, k, threads, arena)
    checkpoint.release(part)
    return packed


def _vector(checkpoint: Checkpoint, part: Part) -> Vector:
    return aligned(VECTORS[part.tensor.kind](checkpoint.data(part)))


def _bfloat16(raw: NDArray[np.uint8]) -> Vector:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


#: Element types of norms and biases, and how their bytes become floats.
VECTORS: dict[str, Callable[[NDArray[np.uint8]], Vector]] = {
    "F32": lambda raw: raw.view(np.float32).copy(),
    "F16": lambda raw: raw.view(np.float16).astype(np.float32),
    "BF16": _bfloat16,
}


def unsupported(part: Part) -> str | None:
    """Why this tensor cannot be packed, or None."""
    known = FORMATS if part.is_matrix else VECTORS
    if part.tensor.kind in known:
        return None
    return f"tensor {part.tensor.name} has type {part.tensor.kind}; supported are {', '.join(known)}"


def packable_parts(checkpoint: Checkpoint) -> list[Part]:
    """All tensors of a checkpoint, each in its place.

    Raises ModelFormatError naming a missing, extra or misshapen tensor, and UnsupportedModel naming a tensor of a type
    that has no packed layout.
    """
    parts = checkpoint.parts()
    for problem in filter(None, map(unsupported, parts)):
        raise UnsupportedModel(f"{checkpoint.path}: {problem}")
    return parts


def load_weights(checkpoint: Checkpoint, *, threads: int = 1, progress: Progress | None = None) -> Weights:
    """Pack all tensors of a checkpoint; memory beyond the packed form stays under one tensor.

    progress(done, total) counts tensors. Raises as `packable_parts` does, before anything is packed.
    """
    parts = packable_parts(checkpoint)
    arena, own = _arena(parts), LayerWeights()
    layers = [LayerWeights() for _ in range(checkpoint.spec.n_layers)]
    for done, part in enumerate(parts, 1):
        home = own if part.layer is None else layers[part.layer]
        if part.is_matrix:
            home.matrices[part.role] = _matrix(checkpoint, part, threads, arena)
        else:
            home.vectors[part.role] = _vector(checkpoint, part)
        if progress is not None:
            progress(done, len(parts))
    embedding = own.matrices["embedding"]
    return Weights(embedding, own.matrices.get("output", embedding), own.vectors["output_norm"], layers)
