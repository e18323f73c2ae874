"""What a model takes, and what is left for its KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from miro_cy import Engine, EngineConfig
from miro_cy._kernels.kv import KVLayer
from miro_cy.config import KVDtype
from miro_cy.errors import ConfigError, Unavailable
from miro_cy.memory import Room, kv_blocks, packed_bytes, room_for, rope_bytes, step_bytes
from miro_cy.model.opening import open_checkpoint
from miro_cy.model.spec import KV_BYTES, AttentionSpec, ModelSpec, RopeSpec
from miro_cy.model.step import buffer_bytes

GOLDEN = Path(__file__).parent / "data" / "golden"
#: 1,000 bytes are left, for ten blocks of 100.
ROOM = Room(total=1500, weights=300, activations=200, block=100, block_size=32)


def spec_of(layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        vocab_size=32_000,
        hidden_size=64 * head_dim,
        n_heads=64,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=28_672,
        context=4096,
        norm_eps=1e-5,
        rope=RopeSpec(10_000.0, head_dim),
        layers=(AttentionSpec(),) * layers,
        tied_output=False,
    )


def test_bytes_a_token_of_llama_2_70b() -> None:
    """80 layers, 8 KV heads and 128 dimensions: the figure that papers on paged caches give for float16."""
    spec = spec_of(80, 8, 128)
    assert spec.kv_bytes_per_token("fp16") == 327_680
    assert spec.kv_bytes_per_token("fp32") == 2 * 327_680
    assert spec.kv_bytes_per_token("int8") == 327_680 // 2 + 80 * 8 * 2 * 4  # a float32 scale for K and one for V


@pytest.mark.parametrize("dtype", KV_BYTES)
@pytest.mark.parametrize("head_dim", [4, 16, 20, 64, 80])
def test_bytes_a_token_are_those_of_the_arrays(dtype: KVDtype, head_dim: int) -> None:
    layer = KVLayer(3, 2, head_dim, 16, dtype)
    assert layer.nbytes == 3 * 16 * spec_of(1, 2, head_dim).kv_bytes_per_token(dtype)


@pytest.mark.parametrize("name", ["gguf/Q4_1.gguf", "hf/llama", "hf/llama-tied-bias"])
def test_buffers_are_those_of_the_executor(name: str) -> None:
    config = EngineConfig(threads=2, max_step_tokens=100, max_num_seqs=7)
    with Engine.load(GOLDEN / name, config=config) as engine:
        spec, executor, scheduler = (getattr(engine._parts, part) for part in ("spec", "executor", "scheduler"))
        tokens = scheduler.view.max_tokens
        assert executor.buffer_bytes == buffer_bytes(spec, threads=2, max_tokens=tokens, max_logits=1)
        assert step_bytes(spec, config, 2) == buffer_bytes(
            spec, threads=2, max_tokens=tokens, max_logits=scheduler.max_logits
        )
        engine.logits(range(90))  # grows the logits
        assert executor.buffer_bytes <= step_bytes(spec, config, 2)


def test_more_sequences_than_step_tokens_need_larger_buffers() -> None:
    spec = spec_of(1, 8, 16)
    few, many = (EngineConfig(max_step_tokens=8, max_num_seqs=n) for n in (8, 200))
    assert step_bytes(spec, many, 1) - step_bytes(spec, few, 1) > 100 * 4 * spec.ffn_size


@pytest.mark.parametrize("dtype", KV_BYTES)
def test_room_is_what_nothing_else_takes(dtype: KVDtype) -> None:
    config = EngineConfig(block_size=16)
    with open_checkpoint(GOLDEN / "gguf/Q4_1.gguf") as checkpoint:
        spec, parts = checkpoint.spec, checkpoint.parts()
    weights, buffers = packed_bytes(parts), step_bytes(spec, config, 1)
    token = spec.kv_bytes_per_token(dtype)
    for tokens, context in ((100, 512), (10_000, 512), (0, 512), (-10, 512)):
        total = weights + buffers + tokens * token
        room = room_for(spec, parts, config, dtype, threads=1, context=context, total=total)
        positions = max(0, min(tokens, context))
        assert room == Room(total, weights, buffers + rope_bytes(spec, positions), 16 * token, 16)
        assert room.left == tokens * token - rope_bytes(spec, positions)
        assert room.blocks == max(0, room.left) // (16 * token)


@pytest.mark.parametrize(
    ("kv_memory", "context", "want"),
    [
        (1000, 10_000, 10),
        (199, 10_000, 1),
        ("auto", 10_000, 2),  # a quarter of what is left, 2.5 blocks
        ("auto", 1, 2),
        (None, 10_000, 5),  # half of it
        (None, 33, 2),  # one context
    ],
)
def test_blocks_of_a_budget(kv_memory: int | str | None, context: int, want: int) -> None:
    assert kv_blocks(ROOM, EngineConfig(kv_memory=kv_memory), context) == want


@pytest.mark.parametrize(("kv_memory", "want"), [(None, 8), ("auto", 10)])
def test_windows_make_no_pool_smaller(kv_memory: str | None, want: int) -> None:
    """One context is as many blocks of each group as it has tokens for, however few of them one sequence holds."""
    room = Room(total=4500, weights=300, activations=200, block=100, block_size=32, windows=(0, 33))
    assert kv_blocks(room, EngineConfig(kv_memory=kv_memory), 128) == want  # a quarter of what is left is 10


def test_a_share_under_one_block_is_one_block() -> None:
    assert kv_blocks(Room(601, 300, 200, 100, 32), EngineConfig(kv_memory="auto"), 100) == 1


ARITHMETIC = (
    "of 599 bytes the weights take 300 and a step's buffers 200, which leaves 99; one block of 32 tokens takes 100"
)


@pytest.mark.parametrize(
    ("kv_memory", "text"),
    [
        (None, f"there is no room for a KV cache: {ARITHMETIC}"),
        ("auto", f"there is no room for a KV cache: {ARITHMETIC}"),
        (100, f"kv_memory is 100 bytes, but {ARITHMETIC}"),
    ],
)
def test_an_impossible_budget_shows_the_arithmetic(kv_memory: int | str | None, text: str) -> None:
    with pytest.raises(Unavailable) as caught:
        kv_blocks(Room(599, 300, 200, 100, 32), EngineConfig(kv_memory=kv_memory), 100)
    assert (str(caught.value), caught.value.field) == (text, "kv_memory")


def test_a_budget_under_one_block_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="kv_memory is 99 bytes, one block of 32 tokens takes 100") as caught:
        kv_blocks(ROOM, EngineConfig(kv_memory=99), 100)
    assert not isinstance(caught.value, Unavailable)
