"""A client that speaks the protocol by hand, and waits that have a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import zmq

from miro_client import wire

DEADLINE_S = 15.0


class Raw:
    """A DEALER (or REQ) that sends frames as they are; every wait has a deadline."""

    def __init__(self, context: zmq.Context, endpoint: str, kind: int = zmq.DEALER, **options: Any) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def send(self, body: wire.Request, request_id: bytes | None = None) -> bytes:
        request_id = os.urandom(8) if request_id is None else request_id
        self.frames(*wire.encode(request_id, body))
        return request_id

    def generate(self, prompt: str = "abc", request_id: bytes | None = None, **fields: Any) -> bytes:
        sampling = {"max_tokens": fields.pop("max_tokens", 4)} | fields.pop("sampling", {})
        fields.setdefault("stream", True)
        return self.send(wire.Generate(prompt=prompt, sampling=sampling, **fields), request_id)

    def receive(self, timeout: float = DEADLINE_S) -> tuple[bytes, wire.Reply]:
        assert self.socket.poll(timeout * 1000), "no reply before the deadline"
        return wire.decode_reply(self.socket.recv_multipart())

    def silent(self, seconds: float = 0.2) -> bool:
        return not self.socket.poll(seconds * 1000)

    def until_end(self, request_id: bytes) -> list[wire.Reply]:
        """All replies to a request up to its terminal one; those to others are dropped."""
        replies = []
        while True:
            got, reply = self.receive()
            if got != request_id:
                continue
            replies.append(reply)
            if isinstance(reply, wire.Error) or (isinstance(reply, wire.End) and not reply.more):
                return replies

    def close(self) -> None:
        self.socket.close()


def text_of(replies: list[wire.Reply]) -> str:
    return "".join(reply.t for reply in replies if isinstance(reply, wire.Chunk))


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not before the deadline: {what}"
        time.sleep(0.005)
