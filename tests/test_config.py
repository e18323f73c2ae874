"""EngineConfig: every setting's limits, by name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from miro_cy import EngineConfig
from miro_cy.config import MAX_BYTES, parse_bytes
from miro_cy.errors import ConfigError

GOOD: dict[str, list[Any]] = {
    "threads": [None, 1, 1024],
    "kv_memory": [None, "auto", 1, MAX_BYTES, "4GiB"],
    "kv_dtype": [None, "fp16", "fp32", "int8", "bf16"],
    "compute": [None, "fast", "exact", "bf16"],
    "block_size": [16, 32, 64],
    "max_context": [None, 1, 2**24],
    "max_num_seqs": [1, 4096],
    "max_waiting": [1, 2**20],
    "max_step_tokens": [1, 2**16],
    "step_ms": [0.001, 50, 60_000],
    "prefix_cache": [True, False],
    "policy": ["fcfs", "priority", "fair"],
    "ageing_ms": [0.001, 3_600_000],
    "admission": ["watermark", "reserve"],
    "watermark": [0, 0.5],
    "seed": [None, 0, 2**64 - 1],
}
BAD: dict[str, list[Any]] = {
    "threads": [0, -1, 1025, 1.0, True, "2"],
    "kv_memory": [0, -1, MAX_BYTES + 1, 1.5, True, "", "4 GB of it", "-1", "1e9", "4PiB", b"1", "9" * 400, []],
    "kv_dtype": ["fp8", "", 16, True, "FP16", "BF16", "bfloat16"],
    "compute": ["slow", "", 1, False, "bfloat16", "BF16"],
    "block_size": [0, 8, 17, 128, 32.0, "32", None, True, []],
    "max_context": [0, -5, 2**24 + 1, 512.0, True],
    "max_num_seqs": [0, 4097, None, True],
    "max_waiting": [0, 2**20 + 1, None],
    "max_step_tokens": [0, 2**16 + 1, None, 512.5],
    "step_ms": [0, -1, 60_001, float("nan"), float("inf"), True, "50", None, 10**400],
    "prefix_cache": [0, 1, None, "true", []],
    "policy": ["lifo", "", None, 1, True, []],
    "ageing_ms": [0, -1, 3_600_001, float("nan"), True, "1", None],
    "admission": ["", "none", None, 0],
    "watermark": [-0.01, 0.51, float("nan"), False, "0", None],
    "seed": [-1, 2**64, 0.5, False],
}
FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]


def test_the_tables_cover_every_setting() -> None:
    assert list(GOOD) == FIELDS
    assert list(BAD) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_values_within_limits(name: str) -> None:
    for value in GOOD[name]:
        config = EngineConfig(**{name: value})
        if value != "4GiB":
            assert getattr(config, name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FIELDS for value in BAD[name]])
def test_values_outside_limits_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must ") as caught:
        EngineConfig(**{name: value})
    assert caught.value.field == name
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        (" 500 MB ", 500_000_000),
        ("0.5GiB", 2**29),
        ("64KiB", 65536),
        ("3MiB", 3 * 2**20),
        ("2GB", 2 * 10**9),
        ("7kB", 7000),
        ("2TiB", 2**41),
        ("1.5tb", 15 * 10**11),
        ("123", 123),
        ("123b", 123),
        (2**40, 2**40),
        ("1.000000000000000000GiB", 2**30),
        ("0" * 5000 + "64MiB", 64 * 2**20),
    ],
)
def test_sizes_in_bytes(text: str | int, want: int) -> None:
    assert parse_bytes(text, "kv_memory") == want
    assert EngineConfig(kv_memory=text).kv_memory == want


def test_exact_excludes_all_but_fp32_kv() -> None:
    for narrow in ("fp16", "int8"):
        with pytest.raises(ConfigError, match=narrow) as caught:
            EngineConfig(compute="exact", kv_dtype=narrow)
        assert caught.value.field == "kv_dtype"
        assert EngineConfig(compute="fast", kv_dtype=narrow).kv_dtype == narrow
        assert EngineConfig(compute="bf16", kv_dtype=narrow).kv_dtype == narrow
    for compute in ("exact", "fast", "bf16"):
        assert EngineConfig(compute=compute, kv_dtype="fp32").kv_dtype == "fp32"


def test_bf16_kv_needs_compute_bf16() -> None:
    for compute, text in (
        ("fast", "kv_dtype 'bf16' goes with compute 'bf16', in tile registers (Intel AMX), not with 'fast'"),
        ("exact", "compute 'exact' keeps the KV cache in fp32; kv_dtype 'bf16' contradicts it"),
    ):
        for base, changes in (
            (EngineConfig(), {"compute": compute, "kv_dtype": "bf16"}),
            (EngineConfig(compute=compute), {"kv_dtype": "bf16"}),
            (EngineConfig(compute="bf16", kv_dtype="bf16"), {"compute": compute}),
        ):
            with pytest.raises(ConfigError, match=f"^{re.escape(text)}$") as caught:
                EngineConfig.build(base, changes)
            assert caught.value.field == "kv_dtype"
    assert EngineConfig(compute="bf16", kv_dtype="bf16").kv_dtype == "bf16"
    assert EngineConfig(kv_dtype="bf16").compute is None, "decided when the model is loaded"


def test_overrides_win_over_a_base() -> None:
    base = EngineConfig(threads=2, block_size=64, kv_memory="1GiB")
    config = EngineConfig.build(base, {"threads": 3, "seed": 7})
    assert config == EngineConfig(threads=3, block_size=64, kv_memory=2**30, seed=7)
    assert EngineConfig.build(None, {}) == EngineConfig()
    assert EngineConfig.build(base, {"threads": None}).threads is None
    assert base.threads == 2


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'max_batch'; known are threads, kv_memory") as caught:
        EngineConfig.build(None, {"max_batch": 1})
    assert caught.value.field == "max_batch"


def test_overrides_are_checked_with_the_base() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.build(EngineConfig(kv_dtype="fp16"), {"compute": "exact"})
    assert caught.value.field == "kv_dtype"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().threads = 2  # type: ignore[misc]
