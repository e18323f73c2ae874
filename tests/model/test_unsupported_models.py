"""Real checkpoints of other architectures and scalings are refused by name; none is loaded as something it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from miro_cy import Engine
from miro_cy.errors import UnsupportedModel

#: Reference folder -> what the refusal names. All of them resemble a llama.
REFUSED = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "granite": "granite",
    "llama-yarn": "scaling 'yarn'",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "qwen2": "qwen2",
    "qwen3-moe": "qwen3_moe",
    "smollm3": "smollm3",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_supported_is_refused_by_name(reference_data: Path, name: str) -> None:
    folder = reference_data / "hf" / name
    with pytest.raises(UnsupportedModel, match=REFUSED[name]):
        Engine.load(folder, threads=1)


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"gemma3", "smollm3"}))  # these have none
def test_so_is_its_gguf_file(reference_data: Path, name: str) -> None:
    file = reference_data / "hf" / name / "model-f32.gguf"
    with pytest.raises(UnsupportedModel, match=r"scaling 'yarn'|architecture|mixture-of-experts"):
        Engine.load(file, threads=1)
