"""From a path to an open Checkpoint: the one place that tells the formats apart."""

from __future__ import annotations

from pathlib import Path

from miro_cy.errors import ModelFormatError, ModelNotFound
from miro_cy.formats.safetensors import safetensors_in
from miro_cy.model import gguf_llama, hf_llama
from miro_cy.model.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path: a GGUF file, or a folder of safetensors files (Hugging Face) or with one GGUF file.

    A folder that holds both is read as safetensors. Raises ModelNotFound, ModelFormatError or UnsupportedModel.
    """
    if path.suffix == ".safetensors" and path.is_file():
        raise ModelFormatError(f"{path} is a file of a Hugging Face folder; name the folder")
    if not path.is_dir():
        return gguf_llama.open_gguf(path)
    try:
        if safetensors_in(path):
            return hf_llama.open_folder(path)
        found = sorted(file for file in path.iterdir() if file.suffix == ".gguf" and file.is_file())
    except OSError as error:
        raise ModelNotFound(f"cannot open {path}: {error.strerror}") from None
    if len(found) != 1:
        holds = (
            f"{len(found)} .gguf files; name one of them" if found else "neither .safetensors files nor a .gguf file"
        )
        raise ModelFormatError(f"{path} is a folder with {holds}")
    return gguf_llama.open_gguf(found[0])
