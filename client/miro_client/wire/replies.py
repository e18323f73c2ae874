"""Bodies from worker to client. Unknown keys are ignored, so that a newer worker may add some."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from miro_client.errors import BadField, BadVersion, MiroError
from miro_client.wire.kinds import MAJOR

Answer = TypeVar("Answer", bound=Struct)


class _Reply(Struct, omit_defaults=True):
    """Base of the reply bodies: unknown keys are ignored."""


class Limits(_Reply, kw_only=True):
    """What one connection may do: bytes of a frame, live requests, bytes of prompts not yet tokenised, messages/s."""

    message_bytes: int = 0
    requests: int = 0
    prompt_bytes: int = 0
    messages_per_second: int = 0


class Welcome(_Reply, kw_only=True):
    minor: int
    server: str
    model: str
    context: int
    limits: Limits
    epoch: int
    fingerprint: str


class Accepted(_Reply, kw_only=True):
    """tokens: prompt ids, int32 little-endian; position: absolute position of the first generated token."""

    tokens: bytes
    seed: int
    position: int
    fingerprint: str


#: One token: its natural-log probability and the likeliest alternatives, best first.
Logprob = tuple[float, list[tuple[int, float]]]


class Chunk(_Reply, kw_only=True):
    """i: choice, s: sequence number without gaps, t: text, k: token ids, lp: one entry a token."""

    i: int = 0
    s: int
    t: str = ""
    k: bytes = b""
    lp: list[Logprob] | None = None


class Usage(_Reply, kw_only=True):
    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Timing(_Reply, kw_only=True):
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class End(_Reply, kw_only=True):
    """The last message of a choice. t, k and lp are set when nothing was streamed; of choice 0 tokens, seed and
    fingerprint, too.

    more: other choices have not ended. score: by which the choices are in order, best first, if they are.
    plp (of choice 0): one entry a token of the prompt, None for the first, if prompt_logprobs were asked for and are
    complete.
    """

    i: int = 0
    reason: str
    code: str | None = None
    message: str | None = None
    stop: str | int | None = None
    usage: Usage
    timing: Timing
    t: str | None = None
    k: bytes | None = None
    lp: list[Logprob] | None = None
    tokens: bytes | None = None
    seed: int | None = None
    fingerprint: str | None = None
    plp: list[Logprob | None] | None = None
    more: bool = False
    score: float | None = None


class Pong(_Reply, kw_only=True):
    """The worker's state; live: ids of this connection's requests that are not finished.

    free_blocks: KV blocks that a new request could have, those that are kept for prompts that begin alike included.
    """

    epoch: int
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    last_step_age_ms: float = 0.0
    live: list[bytes] = []
    echo: Any = None


class StatsReply(_Reply, kw_only=True):
    """Counters since the start, and gauges. Each GENERATE is in exactly one of live, ended, refused and abandoned.

    requests: GENERATEs received; ended: by the reason of their END; refused: by the code of their ERROR; abandoned:
    their connection was lost. errors: ERRORs to other messages, by code. preparing: prompts that wait to be tokenised.
    dropped: replies that could not be delivered; strays: messages whose connection was gone.
    resident_bytes: memory in use, 0 where unknown. cached_tokens: of prompt_tokens, those that were not computed again.
    """

    epoch: int
    uptime_ms: float
    messages: int = 0
    requests: int = 0
    live: int = 0
    ended: dict[str, int] = {}
    refused: dict[str, int] = {}
    abandoned: int = 0
    errors: dict[str, int] = {}
    dropped: int = 0
    strays: int = 0
    peers: int = 0
    preparing: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    last_step_age_ms: float = 0.0
    resident_bytes: int = 0


class HealthReply(_Reply, kw_only=True):
    """status: starting (no token was generated yet), ok, stalled, draining or failed; ready: whether it is ok.

    stalled_ms: how long the thread that is behind has been at one thing; 0 unless stalled.
    """

    status: str
    ready: bool
    epoch: int
    uptime_ms: float
    live: int = 0
    last_step_age_ms: float = 0.0
    stalled_ms: float = 0.0


class ModelInfo(_Reply, kw_only=True):
    """A model that is served.

    capacity: tokens that its KV cache holds; text, chat: whether prompts and messages are taken, not only token ids;
    sampling: what its makers recommend.
    """

    name: str
    context: int
    fingerprint: str
    architecture: str = ""
    vocab_size: int = 0
    layers: int = 0
    compute: str = ""
    kv_dtype: str = ""
    block_size: int = 0
    capacity: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    threads: int = 0
    isa: str = ""
    text: bool = True
    chat: bool = True
    sampling: dict[str, float] = {}


class ModelsReply(_Reply, kw_only=True):
    models: list[ModelInfo] = []


class DrainReply(_Reply, kw_only=True):
    """live: requests that may still finish."""

    live: int = 0


class Error(_Reply, kw_only=True):
    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None
    supported: list[int] | None = None


class Result:
    """The body of a RESULT, to be read as what the request asks for."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def read(self, kind: type[Answer]) -> Answer:
        """Raises BadField when it is something else."""
        try:
            return msgspec.msgpack.decode(self.body, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadField(f"a RESULT cannot be read as {kind.__name__}: {error!s:.200}") from None


def plain(text: str) -> str:
    """The text, with what UTF-8 cannot hold replaced."""
    return text.encode(errors="replace").decode()


def error_body(error: MiroError) -> Error:
    """The body of the ERROR that tells of it."""
    return Error(
        code=error.code,
        message=plain(error.message),
        field=None if error.field is None else plain(error.field),
        retry_after_ms=error.retry_after_ms,
        supported=[MAJOR] if isinstance(error, BadVersion) else None,
    )


Answers = StatsReply | HealthReply | ModelsReply | DrainReply
Reply = Welcome | Accepted | Chunk | End | Pong | Error | Result
