"""What the I/O thread checks before a request goes further: limits, and all that needs no model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import UNSET

from miro_client import wire
from miro_client.errors import BadField, Draining, QueueFull, Unsupported
from miro_cy.sampling.params import SamplingParams
from miro_worker.config import WorkerConfig
from miro_worker.conversation import size_of
from miro_worker.jobs import Job
from miro_worker.sockets import Peer
from miro_worker.streams import Stream

#: Fields of GENERATE that are understood, but only with these values.
NOT_YET: tuple[tuple[str, Any], ...] = (("echo", False), ("resume", None))


class Admission:
    """Counts what each peer, and all of them, have asked for."""

    def __init__(self, config: WorkerConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._prompt_bytes = 0

    @property
    def limits(self) -> wire.Limits:
        config = self._config
        return wire.Limits(
            message_bytes=config.max_message_bytes,
            requests=config.max_peer_requests,
            prompt_bytes=config.max_peer_prompt_bytes,
            messages_per_second=config.messages_per_second,
        )

    def check_rate(self, peer: Peer) -> None:
        """Count a message. Raises RateLimited."""
        peer.count_message(self._config.messages_per_second, self._clock())

    def admit(self, peer: Peer, body: wire.Generate, *, delimited: bool, live: int, draining: bool) -> tuple[Job, int]:
        """The job of a GENERATE and the size of its prompt in bytes. Raises what is wrong with it, or in its way."""
        if draining:
            raise Draining("the worker is stopping")
        _check_features(body, delimited=delimited)
        prompt, size = _prompt_of(body)
        params = _params_of(body)
        if delimited and params.n_choices > 1:
            raise Unsupported(
                f"a REQ socket takes one reply, not those of {params.n_choices} choices: use DEALER",
                field="n" if params.n > 1 else "beam_width",
            )
        job = Job(
            prompt,
            params,
            self._clock(),
            priority=body.priority,
            client=_name_of(peer),
            queue_ms=body.queue_ms,
            deadline_ms=body.deadline_ms,
        )
        config = self._config
        if len(peer.streams) >= config.max_peer_requests:
            raise self.queue_full(f"{config.max_peer_requests} requests of this connection are live")
        if live >= config.max_requests:
            raise self.queue_full(f"{config.max_requests} requests are live")
        if peer.prompt_bytes + size > config.max_peer_prompt_bytes:
            raise self.queue_full(f"more than {config.max_peer_prompt_bytes} bytes of prompts of this connection wait")
        if self._prompt_bytes + size > config.max_prompt_bytes:
            raise self.queue_full(f"more than {config.max_prompt_bytes} bytes of prompts wait")
        return job, size

    def waits(self, stream: Stream, size: int) -> None:
        """The prompt of this stream, of so many bytes, waits for the text thread."""
        stream.prompt_bytes = size
        stream.peer.prompt_bytes += size
        self._prompt_bytes += size

    def prepared(self, stream: Stream) -> None:
        """It waits no longer. Idempotent."""
        stream.peer.prompt_bytes -= stream.prompt_bytes
        self._prompt_bytes -= stream.prompt_bytes
        stream.prompt_bytes = 0

    def queue_full(self, message: str) -> QueueFull:
        return QueueFull(message, retry_after_ms=self._config.retry_after_ms)


def _name_of(peer: Peer) -> str:
    """One name a connection, of a length that any routing id fits."""
    return hashlib.blake2b(peer.routing_id, digest_size=16, salt=peer.fd.to_bytes(8, "little")).hexdigest()


def _check_features(body: wire.Generate, *, delimited: bool) -> None:
    if delimited and body.stream:
        raise Unsupported("a REQ socket takes one reply: send stream=false or use DEALER", field="stream")
    if body.credit is not None and not body.stream:
        raise BadField("credit needs stream=true", field="credit")
    for field, default in NOT_YET:
        if getattr(body, field) != default:
            raise Unsupported(f"{field} is not supported by this worker", field=field)


def _prompt_of(body: wire.Generate) -> tuple[str | Mapping[str, Any], int]:
    """The prompt as the text thread takes it, and its size."""
    given = [name for name in ("prompt", "tokens", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) or "none"
        raise BadField(f"give exactly one of prompt, tokens and messages, not {what}", field=(given or ["prompt"])[-1])
    if body.prompt is not None:
        return body.prompt, len(body.prompt.encode())
    if body.tokens is not None:
        if not body.tokens or len(body.tokens) % 4:
            raise BadField(f"tokens take 4 bytes each and there is at least one, got {len(body.tokens)} bytes",
                           field="tokens")  # fmt: skip
        return {"tokens": body.tokens}, len(body.tokens)
    messages = body.messages or []
    return {"messages": messages}, size_of(messages)


def _params_of(body: wire.Generate) -> SamplingParams:
    sampling: dict[str, Any] = dict(body.sampling)
    for name in wire.ALSO_SAMPLING:
        value = getattr(body, name)
        if value is UNSET:
            continue
        other = sampling.get(name, value)
        if other is not value and (type(other) is not type(value) or other != value):  # true is no 1
            for each in (other, value):  # what is wrong by itself says more, and NaN never equals NaN
                SamplingParams.from_mapping({name: each})
            raise BadField(f"{name} is given twice, with different values", field=name)
        sampling[name] = value
    return SamplingParams.from_mapping(sampling)
