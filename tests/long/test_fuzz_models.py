"""Promise 6: a model file is data. Thousands of damaged models are refused by name, or load and answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loaders import load_mutants

MUTANTS = 12_000


def test_promise_a_model_file_is_data_under_thousands_of_mutations(
    tmp_path: Path,
    golden_models: list[Path],
    text_model: Path,
    hostile_folders: list[Path],
    scaled: Callable[[int], int],
    patience: float,
) -> None:
    """Half of them GGUF files, half Hugging Face folders."""
    count = scaled(MUTANTS)
    # The tokenizer of the last file is damaged with it, hence twice.
    models = [*golden_models, text_model, text_model, *hostile_folders]
    kinds = load_mutants(tmp_path, models, count, patience)
    assert kinds["refused"] > count / 4, kinds
    assert kinds["answered"] > count / 10, kinds
    assert kinds["failed"] > 0, kinds
