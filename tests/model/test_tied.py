"""Tied embeddings: one matrix in memory, whether it looks tokens up or scores them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miro_cy import Engine
from miro_cy.formats.ggml_types import GGMLType
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.weights import load_weights

MEASURE = """
import sys
from miro_cy import Engine

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))

small, model = sys.argv[1:]
# few tokens a step: buffers lie in large pages, which are there as a whole with their first byte
settings = {"threads": 1, "kv_memory": "1MiB", "max_step_tokens": 32, "max_num_seqs": 8}
with Engine.load(small, **settings) as engine:  # the libraries
    engine.logits([1, 2, 3])
before = resident()
engine = Engine.load(model, **settings)
engine.logits([1, 2, 3])
print(resident() - before)
"""


def test_a_tied_matrix_is_packed_once(checkpoint: Any) -> None:
    del checkpoint.tensors["output.weight"]
    with open_checkpoint(checkpoint.write()) as stored:
        assert stored.spec.tied_output
        weights = load_weights(stored)
    assert weights.output is weights.embedding
    assert sum(matrix.nbytes for matrix in weights.matrices()) == weights.nbytes


def test_a_folder_that_stores_a_tied_matrix_twice_loads_it_once(open_folder: Any) -> None:
    folder = open_folder("llama-tied-bias")
    kind, shape, data = folder.tensors["model.embed_tokens.weight"]
    with Engine.load(folder.write(), threads=1) as engine:
        expected = engine.logits([1, 2, 3])
    folder.tensors["lm_head.weight"] = (kind, shape, bytes(len(data)))  # zeros: if it were used, all would be equal
    with Engine.load(folder.write(), threads=1) as engine:
        np.testing.assert_array_equal(engine.logits([1, 2, 3]), expected)


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16])
def test_memory_of_a_tied_model(larger_checkpoint: Any, golden_file: Any, kind: GGMLType) -> None:
    """Resident memory of a model that is nearly all embedding: the file's tensors, not one matrix more."""
    checkpoint = larger_checkpoint
    del checkpoint.tensors["output.weight"]
    checkpoint.vocab = 32768
    shape = (checkpoint.vocab, checkpoint.hidden)
    checkpoint.tensors["token_embd.weight"] = (shape, kind)
    path: Path = checkpoint.write()
    with open_checkpoint(path) as stored:
        total = sum(tensor.nbytes for tensor in stored.source.tensors.values())
    embedding = shape[0] * shape[1] * (4 if kind == GGMLType.F32 else 2)
    assert embedding > 0.75 * total
    command = [sys.executable, "-c", MEASURE, str(golden_file("hf/llama/model-f32.gguf")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.8 * total < int(done.stdout) < total + 0.5 * embedding
