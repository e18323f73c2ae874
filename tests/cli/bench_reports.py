"""Reports of `miro bench`, made up."""

from __future__ import annotations

from typing import Any


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": 0.5 * median, "max": 2 * median}


def row(work: str, rows: int, depth: int, tokens: int, seconds: float) -> dict[str, Any]:
    """With the fields that an engine's report and a worker's have."""
    return {
        "work": work,
        "rows": rows,
        "depth": depth,
        "tokens": tokens,
        "seconds": spread(seconds),
        "tokens_per_second": tokens / seconds,
    }


def report(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An engine's. changes: "machine_threads" and the like, or whole fields."""
    made: dict[str, Any] = {
        "format": "miro-bench",
        "format_version": 1,
        "miro": "9.9.9",
        "machine": {"cpu": "A CPU", "cpus": 4, "isa": "v3", "threads": 2},
        "model": {
            "name": "small",
            "format": "GGUF 3",
            "parameters": 1000,
            "layers": 10,
            "file_bytes": 4000,
            "packed_bytes": 5000,
            "compute": "fast",
            "kv_dtype": "fp16",
        },
        "settings": {
            "repeat": 2, "tokens": 4, "context": 512, "block_size": 32, "max_step_tokens": 512, "step_ms": 60000.0,
        },
        "limits": {"read_gb_per_s": 10.0, "read_bytes": 1, "fma_gflops": 100.0, "int8_gflops": 400.0},
        "rows": list(rows) or [row("prompt", 1, 0, 40, 0.5)],
        "load": None,
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("_")
        if field and isinstance(made.get(part), dict):
            made[part][field] = value
        else:
            made[name] = value
    return made


def full(made: dict[str, Any]) -> dict[str, Any]:
    """With the fields of a row that only an engine's report has, and what the command adds."""
    rates = {"gflops": 1.0, "gb_per_s": 1.0, "share_of_flops": 0.1, "share_of_bandwidth": 0.2, "bound": "bandwidth"}
    made["rows"] = [each | rates for each in made["rows"]]
    return made
