"""Checkpoint: a model as stored, whatever the format. A spec, and every tensor that the spec needs, by its role.

`gguf_llama` and `hf_llama` make one each; `weights` packs from it and knows no format. Names, shapes and presence are
all checked before the first byte of a tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from miro_cy.errors import ModelFormatError
from miro_cy.formats.tensors import TensorEntry, TensorSource
from miro_cy.model.generation import GenerationDefaults
from miro_cy.model.spec import ModelSpec

#: role -> shape, as names of `sizes`
MODEL_ROLES = {
    "embedding": ("vocab", "hidden"),
    "output": ("vocab", "hidden"),
    "output_norm": ("hidden",),
}
LAYER_ROLES = {
    "attn_norm": ("hidden",),
    "q": ("q", "hidden"),
    "k": ("kv", "hidden"),
    "v": ("kv", "hidden"),
    "o": ("hidden", "q"),
    "ffn_norm": ("hidden",),
    "gate": ("ffn", "hidden"),
    "up": ("ffn", "hidden"),
    "down": ("hidden", "ffn"),
}
#: Of specs with `qk_norm`.
QK_NORM_ROLES = {
    "q_norm": ("head",),
    "k_norm": ("head",),
}
BIAS_ROLES = {
    "q_bias": ("q",),
    "k_bias": ("kv",),
    "v_bias": ("kv",),
    "o_bias": ("hidden",),
    "gate_bias": ("ffn",),
    "up_bias": ("ffn",),
    "down_bias": ("hidden",),
}
SHAPES = MODEL_ROLES | LAYER_ROLES | QK_NORM_ROLES | BIAS_ROLES
#: Roles whose rows are rotated in pairs.
ROTATED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


def sizes(spec: ModelSpec) -> dict[str, int]:
    """The dimensions that shapes are made of."""
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "q": spec.n_heads * spec.head_dim,
        "kv": spec.n_kv_heads * spec.head_dim,
        "ffn": spec.ffn_size,
        "head": spec.head_dim,
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor in its place; `layer` is None for one that the whole model has."""

    role: str
    layer: int | None
    tensor: TensorEntry

    @property
    def is_matrix(self) -> bool:
        return len(self.tensor.shape) == 2


@dataclass(slots=True)
class Checkpoint:
    """An open checkpoint; a context manager.

    names: role -> tensor name, "{}" standing for the layer's number; roles that are not there have no tensor.
    optional: roles whose tensor may be missing. ignored: names of tensors that are no weights.
    split_pairs: the file keeps the two members of a rotary pair half a head apart, as Hugging Face's folders and GGUF
        files of a qwen3 do; the kernels, like GGUF files of a llama, want them next to each other, and `data` hands
        them out that way.
    """

    source: TensorSource
    format: str
    spec: ModelSpec
    names: Mapping[str, str]
    optional: Collection[str] = ()
    ignored: Collection[str] = ()
    split_pairs: bool = False
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.source.path

    @property
    def name(self) -> str:
        """What to call the model."""
        path = self.path.resolve()
        name = path.name if path.is_dir() else path.stem
        return os.fsencode(name).decode(errors="replace")  # file names are bytes; this one goes on the wire

    def parts(self) -> list[Part]:
        """Every tensor of the model in its place: the model's own, then layer by layer.

        Raises ModelFormatError naming a tensor that is missing, misshapen, or not part of such a model.
        """
        dims = sizes(self.spec)
        tensors = self.source.tensors
        unread = set(tensors) - set(self.ignored)
        found = []
        for role, layer in self._places():
            name = self.names[role].format(layer)
            tensor = tensors.get(name)
            if tensor is None:
                if role in self.optional:
                    continue
                raise ModelFormatError(f"{self.path}: tensor {name} is missing")
            want = tuple(dims[d] for d in SHAPES[role])
            if tensor.shape != want:
                raise ModelFormatError(f"{self.path}: tensor {name} has shape {tensor.shape}, expected {want}")
            unread.discard(name)
            found.append(Part(role, layer, tensor))
        if unread:
            raise ModelFormatError(
                f"{self.path}: tensor {min(unread)!r:.100} is not part of a {self.spec.architecture} model"
            )
        return found

    def data(self, part: Part) -> NDArray[np.uint8]:
        """A tensor's bytes, rows one after the other; those of rotary pairs next to each other."""
        raw = self.source.data(part.tensor.name)
        if not self.split_pairs or part.role not in ROTATED:
            return raw
        halves = raw.reshape(-1, 2, self.spec.head_dim // 2, raw.nbytes // part.tensor.shape[0])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)

    def release(self, part: Part) -> None:
        """Give the memory of a tensor's pages back."""
        self.source.release(part.tensor.name)

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _places(self) -> Iterable[tuple[str, int | None]]:
        yield from ((role, None) for role in MODEL_ROLES if role in self.names)
        norms = QK_NORM_ROLES if self.spec.qk_norm else ()
        for layer in range(self.spec.n_layers):
            yield from ((role, layer) for role in (*LAYER_ROLES, *norms, *BIAS_ROLES) if role in self.names)
