"""What is refused when a model is loaded, by which name, and what loading costs."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miro_cy import Engine
from miro_cy.errors import ConfigError, ModelFormatError, ModelNotFound, Unavailable, UnsupportedModel
from miro_cy.formats.ggml_types import GGMLType
from miro_cy.model.gguf_llama import LIMITS
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.weights import load_weights

MIB = 2**20


def refuse(path: Path, kind: type[Exception], match: str, **settings: Any) -> None:
    with pytest.raises(kind, match=match):
        Engine.load(path, threads=1, **settings)


def test_the_small_checkpoint_is_sound(checkpoint: Any) -> None:
    progress: list[tuple[int, int]] = []
    path = checkpoint.write()
    with Engine.load(path, threads=1, progress=lambda *counts: progress.append(counts)) as engine:
        assert (engine.name, engine.context, engine.vocab_size) == ("small", 256, 40)
        logits = engine.logits([1, 2, 3])
    assert logits.shape == (3, 40)
    assert np.isfinite(logits).all()
    assert np.ptp(logits) > 0
    n = len(checkpoint.tensors)
    assert progress == [(done, n) for done in range(1, n + 1)]
    assert str(path) not in Path("/proc/self/maps").read_text()  # the file is closed


@pytest.mark.parametrize("name", ["mamba", "llama4", "LLAMA", ""])
def test_unknown_architecture(checkpoint: Any, name: str) -> None:
    checkpoint.metadata["general.architecture"] = name
    refuse(checkpoint.write(), UnsupportedModel, f"architecture '{name}' is not supported")


@pytest.mark.parametrize("kind", [GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.IQ4_NL, GGMLType.I8])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_k.weight"])
def test_unsupported_type_of_a_matrix(checkpoint: Any, name: str, kind: GGMLType) -> None:
    checkpoint.tensors[name] = (checkpoint.tensors[name][0], kind)
    refuse(
        checkpoint.write(), UnsupportedModel, f"tensor {name} has type {kind.name}; supported are F32, F16, BF16, Q8_0"
    )


@pytest.mark.parametrize("kind", [GGMLType.I16, GGMLType.Q8_0])
def test_unsupported_type_of_a_vector(checkpoint: Any, kind: GGMLType) -> None:
    checkpoint.tensors["blk.0.ffn_norm.weight"] = ((64,), kind)
    refuse(checkpoint.write(), UnsupportedModel, f"tensor blk.0.ffn_norm.weight has type {kind.name}")


@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.BF16])
def test_half_precision_norms_load(checkpoint: Any, kind: GGMLType) -> None:
    checkpoint.tensors["output_norm.weight"] = ((64,), kind)
    with Engine.load(checkpoint.write(), threads=1) as engine:
        assert not engine.logits([1]).any()  # that norm's weights are zeros


def test_each_tensor_is_needed(checkpoint: Any) -> None:
    whole = dict(checkpoint.tensors)
    for name in whole:
        if name == "output.weight":
            continue
        checkpoint.tensors = {other: tensor for other, tensor in whole.items() if other != name}
        refuse(checkpoint.write(), ModelFormatError, f"tensor {name} is missing")


def test_without_an_output_matrix_the_embedding_serves(checkpoint: Any) -> None:
    del checkpoint.tensors["output.weight"]
    with Engine.load(checkpoint.write(), threads=1) as engine:
        assert np.ptp(engine.logits([1])) > 0


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "x"])
def test_extra_tensor(checkpoint: Any, name: str) -> None:
    checkpoint.tensors[name] = ((64, 64), GGMLType.F32)
    refuse(checkpoint.write(), ModelFormatError, f"tensor '{name}' is not part of a llama model")


def test_each_shape_is_checked(checkpoint: Any) -> None:
    whole = dict(checkpoint.tensors)
    for name, (shape, kind) in whole.items():
        for wrong in ((*shape[:-1], 32), (*shape, 1), (1, *shape), (*shape[:-1], shape[-1] + 1)):
            checkpoint.tensors = whole | {name: (wrong, kind)}
            refuse(checkpoint.write(), ModelFormatError, name)
        if len(shape) == 2 and shape[0] != shape[1] and name != "token_embd.weight":
            checkpoint.tensors = whole | {name: (shape[::-1], kind)}
            refuse(checkpoint.write(), ModelFormatError, rf"tensor {name} has shape .*, expected \({shape[0]}, ")


@pytest.mark.parametrize("name", ["attn_q.bias", "attn_k.bias", "attn_output.bias", "ffn_up.bias", "ffn_down.bias"])
def test_shapes_of_biases(checkpoint: Any, name: str) -> None:
    checkpoint.tensors[f"blk.0.{name}"] = ((33,), GGMLType.F32)
    refuse(checkpoint.write(), ModelFormatError, rf"tensor blk.0.{name} has shape \(33,\), expected")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.rope.scaling.type", "yarn", "RoPE scaling 'yarn'"),
        ("llama.rope.scaling.type", "longrope", "RoPE scaling 'longrope'"),
        ("llama.rope.scaling.type", "", "RoPE scaling ''"),
        ("llama.rope.scaling.attn_factor", 1.2, "attn_factor"),
        ("llama.expert_count", 8, "mixture-of-experts"),
        ("llama.attention.causal", False, "not causal"),
        ("llama.attention.value_length", 8, "different sizes"),
        ("split.count", 3, "split over 3 files"),
    ],
)
def test_unsupported_variants(checkpoint: Any, key: str, value: Any, match: str) -> None:
    checkpoint.metadata[key] = value
    refuse(checkpoint.write(), UnsupportedModel, match)


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "linear"}, 1.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1.0),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scale_linear": 0.0}, 1.0),
    ],
)
def test_linear_rope_scaling(checkpoint: Any, metadata: dict[str, Any], factor: float) -> None:
    checkpoint.metadata |= metadata
    with open_checkpoint(checkpoint.write()) as stored:
        assert stored.spec.rope.factor == factor


@pytest.mark.parametrize("factor", [-2.0, float("nan"), float("inf")])
def test_impossible_rope_scaling(checkpoint: Any, factor: float) -> None:
    checkpoint.metadata["llama.rope.scaling.factor"] = factor
    refuse(checkpoint.write(), ModelFormatError, "llama.rope.scaling.factor must be a positive number")


@pytest.mark.parametrize(
    ("shape", "kind", "match"),
    [
        ((8,), GGMLType.F16, "rope_freqs.weight is F16 of shape"),
        ((7,), GGMLType.F32, r"expected F32 of \(8,\)"),
        ((8, 1), GGMLType.F32, r"expected F32 of \(8,\)"),
        ((8,), GGMLType.F32, "RoPE scaling factor is not a positive number"),  # a normal sample: some are negative
    ],
)
def test_unsound_rope_factors(checkpoint: Any, shape: tuple[int, ...], kind: GGMLType, match: str) -> None:
    checkpoint.tensors["rope_freqs.weight"] = (shape, kind)
    refuse(checkpoint.write(), ModelFormatError, match)


def test_keys_that_change_nothing_are_accepted(checkpoint: Any) -> None:
    checkpoint.metadata |= {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scale_linear": 1.0,
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "split.count": 1,
    }
    Engine.load(checkpoint.write(), threads=1).close()


@pytest.mark.parametrize("name", LIMITS)
def test_absurd_sizes_cost_nothing(checkpoint: Any, name: str) -> None:
    tracemalloc.start()
    try:
        for value in (0, LIMITS[name] + 1, 2**32 - 1, ("u64", 2**63), ("i64", -1), 1.5, "64"):
            checkpoint.metadata[f"llama.{name}"] = value
            refuse(checkpoint.write(), ModelFormatError, f"llama.{name}")
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", sorted(set(LIMITS) - {"context_length"}))
def test_sizes_within_limits_that_the_tensors_contradict(checkpoint: Any, name: str) -> None:
    tracemalloc.start()
    try:
        checkpoint.metadata[f"llama.{name}"] = LIMITS[name]
        with pytest.raises((ModelFormatError, UnsupportedModel)):
            Engine.load(checkpoint.write(), threads=1)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attention.head_count_kv": 3}, "4 heads cannot share 3 KV heads"),
        ({"attention.head_count": 128}, "key_length must be between 1 and 512, not 0"),
        ({"rope.dimension_count": 7}, "rotary dimension 7"),
        ({"rope.dimension_count": 18}, "rotary dimension 18"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "epsilon must be a positive number"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon must be a positive number"),
        ({"rope.freq_base": float("inf")}, "freq_base must be a positive number"),
        ({"rope.freq_base": 1e-40}, "freq_base must be a positive number, 1e-12 to 1e"),
        ({"rope.scaling.factor": 1e-45}, "scaling.factor must be a positive number"),
        ({"attention.head_count_kv": [2]}, "'llama.attention.head_count_kv' must be int"),
    ],
)
def test_impossible_settings(checkpoint: Any, changes: dict[str, Any], match: str) -> None:
    checkpoint.metadata |= {f"llama.{key}": value for key, value in changes.items()}
    refuse(checkpoint.write(), ModelFormatError, match)


def test_each_required_key_is_named(checkpoint: Any) -> None:
    whole = dict(checkpoint.metadata)
    optional = {"llama.attention.head_count_kv", "llama.rope.dimension_count"}
    for key in set(whole) - optional:
        checkpoint.metadata = {other: value for other, value in whole.items() if other != key}
        refuse(checkpoint.write(), ModelFormatError, f"'{key}' is missing")


def test_a_vocabulary_larger_than_the_embedding(checkpoint: Any) -> None:
    """Otherwise a text could become ids that the model has no row for."""
    checkpoint.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(0x41 + i) for i in range(41)],
        "tokenizer.ggml.merges": [],
    }
    refuse(checkpoint.write(), ModelFormatError, "41 tokens, the embedding only 40 rows")


def test_what_is_no_model_file(tmp_path: Path, golden_file: Callable[[str], Path]) -> None:
    refuse(tmp_path / "absent.gguf", ModelNotFound, "absent.gguf")
    text = tmp_path / "text.gguf"
    text.write_text("not a model" * 100)
    refuse(text, ModelFormatError, "not a GGUF file")
    data = golden_file("gguf/Q4_0.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 100, 5000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        refuse(cut, ModelFormatError, "cut.gguf")


def test_settings_the_model_contradicts(checkpoint: Any) -> None:
    path = checkpoint.write()
    for settings, field in [
        ({"max_context": 257}, "max_context"),
        ({"kv_memory": 100}, "kv_memory"),
        ({"kv_dtype": "fp16"}, "kv_dtype"),  # a float file is computed exactly, which keeps the cache in fp32
    ]:
        with pytest.raises(ConfigError) as caught:
            Engine.load(path, threads=1, **settings)
        assert caught.value.field == field


def test_settings_reach_the_engine(checkpoint: Any) -> None:
    path = checkpoint.write()
    with Engine.load(path, threads=1, compute="fast", kv_dtype="fp32", max_context=100) as engine:
        assert engine.context == 100
        assert "-fast-fp32-" in engine.fingerprint
        assert engine.stats()["total_blocks"] == 4  # of 32 tokens: one context
    token_bytes = 2 * 2 * 16 * 4  # K and V, 2 KV heads of 16 in fp32
    with Engine.load(path, threads=1, block_size=16, kv_memory=16 * token_bytes * 5 + 1) as engine:
        assert engine.stats()["total_blocks"] == 5
        assert engine.context == 80  # what the pool holds
    assert engine.fingerprint != Engine.load(path, threads=1, compute="fast").fingerprint


def test_fingerprint_tells_checkpoints_apart(checkpoint: Any) -> None:
    path = checkpoint.write()
    with Engine.load(path, threads=1) as engine:
        before = engine.fingerprint
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with Engine.load(path, threads=1) as engine:
        assert engine.fingerprint != before


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory now."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_file_pages_are_released_as_tensors_are_packed(larger_checkpoint: Any) -> None:
    path = larger_checkpoint.write()
    seen: list[int] = []
    with open_checkpoint(path) as stored:
        load_weights(stored, progress=lambda *_: seen.append(resident(path)))
        assert len(seen) == len(stored.source.tensors)
        # Each matrix is 1 to 4 MiB, all together 17; the kernel may map up to 2 MiB around a page that is read.
        assert max(seen) < 6 * MIB
        assert stored.source.data("token_embd.weight").any()  # and can be read again
        assert resident(path) >= 3 * MIB


def test_spec_of_a_file(checkpoint: Any) -> None:
    with open_checkpoint(checkpoint.write()) as stored:
        spec = stored.spec
    assert dataclasses.astuple(spec.rope) == (10000.0, 16, 1.0, ())
    assert (spec.n_layers, spec.vocab_size, spec.hidden_size, spec.ffn_size) == (1, 40, 64, 96)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.context) == (4, 2, 16, 256)
    assert (spec.tied_output, spec.attention_scale) == (False, 0.25)
    assert (spec.kv_bytes_per_token("fp16"), spec.kv_bytes_per_token("fp32")) == (128, 256)


@pytest.mark.parametrize(
    ("free", "kv_memory", "text"),
    [
        (2**26, "63MiB", r"kv_memory is 66,060,288 bytes, but of 67,108,864 bytes the weights take [0-9,]+ and"),
        (2**20, None, "there is no room for a KV cache: of 1,048,576 bytes"),
        (2**20, "auto", r"a step's buffers [0-9,]+, which leaves -[0-9,]+; one block of 32 tokens takes 32,768$"),
    ],
)
def test_an_impossible_budget_is_refused_with_the_arithmetic(
    golden_file: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    kv_memory: str | None,
    text: str,
) -> None:
    """Before anything is packed. A pool that is touched at once would have the system kill the process."""
    monkeypatch.setattr("miro_cy.loading.available_memory", lambda: free)
    packed: list[int] = []
    with pytest.raises(Unavailable, match=text) as caught:
        Engine.load(
            golden_file("gguf/Q4_0.gguf"),
            threads=1,
            kv_memory=kv_memory,
            progress=lambda done, _: packed.append(done),
        )
    assert caught.value.field == "kv_memory"
    assert packed == []
