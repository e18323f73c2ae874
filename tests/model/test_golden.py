"""Logits and greedy continuations against Hugging Face transformers, which made the reference files in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miro_cy import Engine, SamplingParams
from miro_cy.config import Compute

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K"]
MODELS = [
    "llama",
    "llama-tied-bias",
    "llama-mha-headdim",
    "llama-odd",
    "llama-headdim96",
    "llama3-rope",
    "llama-linear-rope",
    "qwen3",
]
#: Largest error of a logit, in parts of the spread of all logits.
TOLERANCE = 2e-3
#: The same for rounded activations on these random weights, which forgive less than a trained model's.
FAST_TOLERANCE = 5e-2

Golden = Callable[[str], Path]


def error_of(logits: np.ndarray, reference: np.ndarray) -> float:
    assert logits.dtype == np.float32
    assert logits.shape == reference.shape
    return float(np.abs(logits - reference).max() / np.ptp(reference))


@pytest.mark.parametrize("kind", TYPES)
def test_exact_logits_of_every_tensor_type(isa: str, golden_file: Golden, kind: str) -> None:
    golden = np.load(golden_file(f"gguf/{kind}.npz"))
    with Engine.load(golden_file(f"gguf/{kind}.gguf"), compute="exact", threads=2) as engine:
        logits = engine.logits(golden["ids"])
    assert error_of(logits, golden["logits"]) <= TOLERANCE
    assert np.array_equal(logits.argmax(1), golden["logits"].argmax(1))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q6_K"])
def test_logits_of_rounded_activations_stay_near(
    isa: str, mode_of_isa: Compute, golden_file: Golden, kind: str
) -> None:
    golden = np.load(golden_file(f"gguf/{kind}.npz"))
    with Engine.load(golden_file(f"gguf/{kind}.gguf"), compute=mode_of_isa, threads=2) as engine:
        assert f"-{mode_of_isa}-{'bf16' if mode_of_isa == 'bf16' else 'fp16'}-{isa}-" in engine.fingerprint
        logits = engine.logits(golden["ids"])
    error = error_of(logits, golden["logits"])
    assert 1e-4 < error <= FAST_TOLERANCE  # not exact either: activations were rounded


@pytest.mark.parametrize("name", MODELS)
def test_models_in_float32(isa: str, golden_file: Golden, name: str) -> None:
    golden = np.load(golden_file(f"hf/{name}/golden.npz"))
    greedy = golden["greedy"].tolist()
    with Engine.load(golden_file(f"hf/{name}/model-f32.gguf"), threads=2) as engine:
        assert f"-exact-fp32-{isa}-" in engine.fingerprint  # the default for a float file
        logits = engine.logits(golden["ids"])
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(greedy))
        completion = engine.generate({"tokens": golden["ids"]}, params)
    assert error_of(logits, golden["logits"]) <= TOLERANCE
    assert np.array_equal(logits.argmax(1), golden["logits"].argmax(1))
    assert completion.tokens == greedy
    assert completion.finish_reason == "length"
    assert completion.usage.prompt_tokens == len(golden["ids"])
    assert completion.usage.completion_tokens == len(greedy)


def test_rows_and_log_softmax(golden_file: Golden) -> None:
    golden = np.load(golden_file("hf/llama/golden.npz"))
    with Engine.load(golden_file("hf/llama/model-f32.gguf"), threads=1) as engine:
        ids = golden["ids"].tolist()
        whole = engine.logits(ids)
        for rows in (slice(-1, None), slice(3, 40, 5), slice(None, None, -1), slice(20, 4, -3)):
            assert np.array_equal(engine.logits(ids, rows=rows), whole[rows])
        assert engine.logits(ids, rows=slice(5, 5)).shape == (0, engine.vocab_size)
        log_probs = engine.logits(ids, log_softmax=True)
    wide = whole.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(1, keepdims=True))
    assert np.abs(log_probs - wide).max() < 1e-5
