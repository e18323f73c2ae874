"""Limits and times of a worker."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field, fields

from miro_client.checks import MAX_INT32, check_int
from miro_client.wire import MAX_MESSAGE_BYTES

MIB = 2**20


def _half_the_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else max(1, min(soft // 2, 2**20))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Every limit a client can meet. A "peer" is one connection. Raises ConfigError naming field and limits.

    max_requests, max_peer_requests: live requests of all peers, and of one.
    max_message_bytes: largest frame; ZeroMQ drops the connection of a peer that sends a larger one.
    max_prompt_bytes, max_peer_prompt_bytes: prompts that wait to be tokenised, of all peers and of one.
    max_reply_bytes: output that waits because a client does not take it, or that is gathered for one END.
    messages_per_second: per peer, over a burst of twice as many; CREDIT and CANCEL are always taken.
    send_hwm: messages ZeroMQ holds for one peer before the worker's own flow control begins.
    slow_client_ms: how long output may wait for a client before its requests end with slow_client.
    grace_ms: how long running requests may go on after a stop was asked for.
    linger_ms: how long the last messages may take to leave when the socket closes.
    retry_after_ms: advice given with queue_full.
    max_connections: what comes beyond is hung up on. Half the process's limit of descriptors by default. A quarter of
    it is kept for the control and admin sockets.
    stalled_ms: health goes red when a step, or the preparation of a prompt, has taken so long.
    """

    max_requests: int = 1024
    max_peer_requests: int = 64
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_prompt_bytes: int = 64 * MIB
    max_peer_prompt_bytes: int = 8 * MIB
    max_reply_bytes: int = 16 * MIB
    messages_per_second: int = 1000
    send_hwm: int = 256
    slow_client_ms: int = 30_000
    grace_ms: int = 10_000
    linger_ms: int = 1_000
    retry_after_ms: int = 500
    stalled_ms: int = 30_000
    max_connections: int = field(default_factory=_half_the_descriptors)

    def __post_init__(self) -> None:
        for setting in fields(self):
            low = 0 if setting.name in ("grace_ms", "linger_ms") else 1
            check_int(setting.name, getattr(self, setting.name), low, MAX_INT32)
