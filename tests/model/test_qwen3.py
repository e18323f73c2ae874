"""A qwen3: heads of q and k are normalised, some layers may have a window. Held to a plain forward pass in NumPy.

That pass is held to the reference logits, and then says what the reference models do not: windows, and biases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miro_cy import Engine
from miro_cy._kernels import reference
from miro_cy.errors import UnsupportedModel

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
TOLERANCE = 2e-3
IDS = np.random.default_rng(4).integers(0, 320, 40)
#: What gives layer 1 of the two a window of 7 keys.
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None}


class Plain:
    """The model in a Folder as transformers defines it: pairs half a head apart, everything in float64."""

    def __init__(self, folder: Any, windows: tuple[int, int]) -> None:
        self.config, self.windows = folder.config, windows
        self.heads = {"q": self.config["num_attention_heads"], "k": self.config["num_key_value_heads"]}
        self.heads["v"] = self.heads["k"]
        self.eps = self.config["rms_norm_eps"]
        self.tensors = {
            name.removeprefix("model."): np.frombuffer(raw, np.float32).reshape(shape)
            for name, (_, shape, raw) in folder.tensors.items()
        }

    def logits(self, ids: NDArray[Any]) -> F64:
        x = self.tensors["embed_tokens.weight"][ids].astype(np.float64)
        for i, window in enumerate(self.windows):
            x = x + self.attention(f"layers.{i}.", self.norm(x, f"layers.{i}.input_layernorm"), window)
            x = x + self.ffn(f"layers.{i}.mlp.", self.norm(x, f"layers.{i}.post_attention_layernorm"))
        return self.norm(x, "norm") @ self.tensors["lm_head.weight"].T

    def norm(self, x: F64, name: str) -> F64:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.tensors[f"{name}.weight"]

    def linear(self, x: F64, name: str) -> F64:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", np.float32(0))

    def attention(self, at: str, x: F64, window: int) -> F64:
        at += "self_attn."
        q, k, v = (self.linear(x, f"{at}{r}_proj").reshape(len(x), self.heads[r], -1) for r in "qkv")
        q, k = self.rotate(self.norm(q, f"{at}q_norm")), self.rotate(self.norm(k, f"{at}k_norm"))
        out = reference.attention(q, k, v, 0, q.shape[-1] ** -0.5, window=window)  # type: ignore[arg-type]
        return self.linear(out.reshape(len(x), -1), f"{at}o_proj")

    def rotate(self, x: F64) -> F64:
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None, None] * 10000.0 ** -(np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def ffn(self, at: str, x: F64) -> F64:
        gate = self.linear(x, f"{at}gate_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, f"{at}up_proj"), f"{at}down_proj")


def assert_near(got: NDArray[Any], want: NDArray[Any]) -> None:
    assert np.abs(got - want).max() <= TOLERANCE * np.ptp(want)


def logits_of(path: Path, **settings: Any) -> F32:
    with Engine.load(path, threads=2, **settings) as engine:
        return engine.logits(IDS)


@pytest.fixture
def folder(open_folder: Callable[[str], Any]) -> Any:
    return open_folder("qwen3")


def test_the_plain_pass_is_right(folder: Any, golden_file: Callable[[str], Path]) -> None:
    golden = np.load(golden_file("hf/qwen3/golden.npz"))
    assert_near(Plain(folder, (0, 0)).logits(golden["ids"]), golden["logits"])


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_window_of_some_layers(isa: str, folder: Any, block_size: int) -> None:
    whole = logits_of(folder.write())
    folder.config |= WINDOW
    got = logits_of(folder.write(), block_size=block_size, max_step_tokens=11)
    assert_near(got, Plain(folder, (0, 7)).logits(IDS))
    assert np.abs(got - whole)[8:].max() > 10 * TOLERANCE * np.ptp(whole)
    assert np.array_equal(got[:7], whole[:7])  # the window is not full before that


def test_biases_come_before_the_norm(isa: str, folder: Any) -> None:
    folder.config["attention_bias"] = True
    rng = np.random.default_rng(1)
    for layer in (0, 1):
        for part, size in (("q", 128), ("k", 64), ("v", 64), ("o", 64)):
            bias = rng.normal(0, 0.1, size).astype(np.float32)
            folder.tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = ("F32", (size,), bias.tobytes())
    plain = Plain(folder, (0, 0))
    assert_near(logits_of(folder.write()), plain.logits(IDS))
    for name in [name for name in plain.tensors if name.endswith(".bias")]:
        del plain.tensors[name]
    with pytest.raises(AssertionError):
        assert_near(logits_of(folder.path), plain.logits(IDS))


def test_each_element_of_a_norm_has_its_place(folder: Any) -> None:
    """Files keep rotary pairs half a head apart: what multiplies an element moves with it."""
    rng = np.random.default_rng(2)
    for name in [name for name in folder.tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        folder.tensors[name] = ("F32", (32,), rng.uniform(0.1, 3, 32).astype(np.float32).tobytes())
    assert_near(logits_of(folder.write()), Plain(folder, (0, 0)).logits(IDS))


def test_tied_embeddings(folder: Any) -> None:
    folder.config["tie_word_embeddings"] = True
    folder.tensors["lm_head.weight"] = folder.tensors["model.embed_tokens.weight"]
    want = Plain(folder, (0, 0)).logits(IDS)
    del folder.tensors["lm_head.weight"]
    assert_near(logits_of(folder.write()), want)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_element_types_of_the_norms(folder: Any, dtype: str) -> None:
    name = "model.layers.1.self_attn.k_norm.weight"
    values = np.linspace(0.5, 2, 32, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)  # exact in all types
    short = {
        "F16": values.view(np.float32).astype(np.float16),
        "BF16": (values >> 16).astype(np.uint16),
        "F64": values.view(np.float32).astype(np.float64),
    }
    folder.tensors[name] = ("F32", (32,), values.tobytes())
    want = logits_of(folder.write())
    folder.tensors[name] = (dtype, (32,), short[dtype].tobytes())
    if dtype == "F64":
        with pytest.raises(UnsupportedModel, match=f"tensor {name} has type F64; supported are F32, F16, BF16"):
            Engine.load(folder.write())
    else:
        np.testing.assert_array_equal(logits_of(folder.write()), want)
