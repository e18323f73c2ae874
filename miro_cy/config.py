"""EngineConfig: the engine's settings, validated once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

from miro_client.checks import check_bool, check_choice, check_int, check_number, shown
from miro_cy.errors import ConfigError

Compute = Literal["fast", "exact", "bf16"]
KVDtype = Literal["fp16", "fp32", "int8", "bf16"]
PolicyName = Literal["fcfs", "priority", "fair"]
Admission = Literal["watermark", "reserve"]

_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("kMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", 1)}
_BYTES_OF = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
MAX_BYTES = 2**48
MAX_CONTEXT = 2**24
#: Limits of settings that engine and scheduler share.
MAX_NUM_SEQS = 4096
MAX_STEP_TOKENS = 2**16
MAX_WAITING = 2**20
MAX_STEP_MS = 60_000
MAX_AGEING_MS = 3_600_000
MAX_WATERMARK = 0.5


class Scheduling(Protocol):
    """The settings that say how requests are scheduled."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...
    @property
    def step_ms(self) -> float: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def policy(self) -> PolicyName: ...
    @property
    def ageing_ms(self) -> float: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def watermark(self) -> float: ...


def check_scheduling(settings: Scheduling) -> None:
    """Raise ConfigError naming the first of these settings that is out of range."""
    check_int("max_num_seqs", settings.max_num_seqs, 1, MAX_NUM_SEQS)
    check_int("max_step_tokens", settings.max_step_tokens, 1, MAX_STEP_TOKENS)
    check_number("step_ms", settings.step_ms, MAX_STEP_MS)
    check_int("max_waiting", settings.max_waiting, 1, MAX_WAITING)
    check_choice("policy", settings.policy, get_args(PolicyName))
    check_number("ageing_ms", settings.ageing_ms, MAX_AGEING_MS)
    check_choice("admission", settings.admission, get_args(Admission))
    check_number("watermark", settings.watermark, MAX_WATERMARK, zero=True)


def parse_bytes(value: object, field: str) -> int:
    """Bytes from an int or from text such as "4GiB" or "500MB". Raises ConfigError naming the field."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{field} must be bytes or text such as '4GiB', not {shown(value)}", field=field)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _BYTES_OF:
            units = ", ".join(filter(None, _UNITS))
            raise ConfigError(f"{field} must be a number and a unit ({units}), not {shown(value)}", field=field)
        number = float(match[1])  # infinite for too many digits
        value = int(min(number * _BYTES_OF[match[2].lower()], MAX_BYTES + 1.0))
        if value > MAX_BYTES:
            raise ConfigError(f"{field} must be between 1 byte and {MAX_BYTES} bytes, not {match[0]:.80}", field=field)
    if not 1 <= value <= MAX_BYTES:
        raise ConfigError(f"{field} must be between 1 byte and {MAX_BYTES} bytes, not {shown(value)}", field=field)
    return value


def check_kv_dtype(dtype: KVDtype | None, compute: Compute) -> None:
    """Raises ConfigError where a KV cache contradicts the arithmetic. None: whatever goes with it."""
    if compute == "exact" and dtype not in (None, "fp32"):
        text = f"compute 'exact' keeps the KV cache in fp32; kv_dtype {dtype!r} contradicts it"
        raise ConfigError(text, field="kv_dtype")
    if compute != "bf16" and dtype == "bf16":
        text = f"kv_dtype 'bf16' goes with compute 'bf16', in tile registers (Intel AMX), not with {compute!r}"
        raise ConfigError(text, field="kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. None means: decided when the model is loaded.

    threads: compute threads (default: what affinity, cgroup quota and physical cores allow).
    kv_memory: bytes of the KV cache, or text such as "4GiB", or "auto" for a server's share of what is free: room for
        four contexts, within a quarter of what weights and buffers leave (default: one context, within half of it). A
        stated size, or "auto", is touched at once, so that memory is flat from then on.
    kv_dtype: "fp16", "fp32", "int8" or "bf16" (default: as compute: "bf16", which needs it, "fp16" under "fast", and
        "fp32" under "exact", which refuses the others).
    compute: "fast" multiplies quantised weights by int8 activations, "bf16" by bfloat16 ones in tile registers (Intel
        AMX, where the machine has them): prompts and steps of many sequences take half as long, those of one or two
        take longer. "exact" works in float32 throughout (default: exact for float files; for quantised ones bf16 where
        there are tile registers and max_num_seqs is above 4, else fast).
    block_size: tokens a KV block holds: 16, 32 or 64.
    max_context: most tokens of a sequence, prompt included (default: the model's).
    max_num_seqs: most sequences that run at once. max_waiting: most that wait for their turn.
        A request of n choices counts as n of either. If they are more, it is served alone, some choices at a time.
    prefix_cache: keep the KV blocks of finished requests while nobody else needs them, for prompts that begin alike.
    max_step_tokens: most tokens a step computes. step_ms: how long a step that carries streams should take.
    policy: who is served next: "fcfs", first come first served; "priority", the highest first, where ageing_ms of
        waiting weigh as much as one level; "fair", the client that was served least.
    admission: "watermark" takes a request when the KV blocks for its tokens are free, and beside them that share of the
        pool, and preempts when the pool runs out; "reserve" keeps room for all its max_tokens, and never preempts.
    seed: where seeds of requests that name none come from (default: the operating system).

    Raises ConfigError naming the field when a value is out of range.
    """

    threads: int | None = None
    kv_memory: int | str | None = None
    kv_dtype: KVDtype | None = None
    compute: Compute | None = None
    block_size: int = 32
    max_context: int | None = None
    max_num_seqs: int = 64
    max_waiting: int = 1024
    max_step_tokens: int = 512
    step_ms: float = 50.0
    prefix_cache: bool = True
    policy: PolicyName = "fcfs"
    ageing_ms: float = 10_000.0
    admission: Admission = "watermark"
    watermark: float = 0.01
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("threads", 1, 1024), ("max_context", 1, MAX_CONTEXT), ("seed", 0, 2**64 - 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, high)
        check_choice("block_size", self.block_size, (16, 32, 64))
        check_choice("kv_dtype", self.kv_dtype, (None, *get_args(KVDtype)))
        check_choice("compute", self.compute, (None, *get_args(Compute)))
        check_bool("prefix_cache", self.prefix_cache)
        check_scheduling(self)
        if self.compute is not None:
            check_kv_dtype(self.kv_dtype, self.compute)
        if self.kv_memory is not None and not (isinstance(self.kv_memory, str) and self.kv_memory == "auto"):
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory, "kv_memory"))

    @classmethod
    def build(cls, base: EngineConfig | None, overrides: dict[str, Any]) -> EngineConfig:
        """`base` (or the defaults) with some settings replaced. Raises ConfigError naming an unknown setting."""
        known = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r:.80}; known are {', '.join(known)}", field=name[:80])
        kept = {} if base is None else {name: getattr(base, name) for name in known}
        return cls(**{**kept, **overrides})
