"""Promises 2 and 5: what hostile clients send gets one typed answer each, and costs no other client a bit."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hostile import Hostile, connection
from raw_client import Raw

from miro_client import Client, wire
from miro_client.errors import CODES
from miro_cy import Engine, SamplingParams

ENGINE = {"threads": 1, "kv_memory": "1MiB", "max_num_seqs": 16}
# Of the worker's limits only these are moved: they would answer most of the messages in place of what is tested.
LIMITS = {"messages_per_second": 1_000_000, "max_peer_requests": 1024, "slow_client_ms": 2000}
CLIENTS = 3
FRAMES = 20_000
CONNECTIONS = 6000
#: How long a connection listens before it goes on.
PATIENCE_S = 0.01
#: Messages of a client that wait for their answer.
WINDOW = 150
#: How long after everything is answered a second answer is looked for.
QUIET_S = 1.0
ASKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "hello wo"}, {"temperature": 0.0, "max_tokens": 30}),
    ({"prompt": "été 😀 hello"}, {"temperature": 0.9, "seed": 3, "max_tokens": 60, "logprobs": 2}),
    ({"tokens": list(range(40, 140))}, {"top_k": 9, "seed": 4, "max_tokens": 25, "logprobs": 1}),
    ({"messages": [{"role": "user", "content": "hello"}]}, {"top_p": 0.8, "seed": 5, "max_tokens": 90}),
]


def whole(answer: Any) -> tuple[Any, ...]:
    logprobs = [(item.logprob, item.top) for item in answer.logprobs or ()]
    return answer.text, list(answer.tokens), logprobs, answer.finish_reason


@pytest.fixture
def expected(text_model: Path) -> list[tuple[Any, ...]]:
    """The answers to ASKS as the engine gives them, one at a time."""
    with Engine.load(text_model, **ENGINE) as engine:
        prompts = [prompt.get("prompt", prompt) for prompt, _ in ASKS]
        return [
            whole(engine.generate(prompt, SamplingParams(**params)))
            for prompt, (_, params) in zip(prompts, ASKS, strict=True)
        ]


class Bystander:
    """A well-behaved client that asks over and over, on its own connection."""

    def __init__(self, endpoint: str, expected: list[tuple[Any, ...]]) -> None:
        self.endpoint, self.expected = endpoint, expected
        self.answers, self.problem = 0, ""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with Client(self.endpoint, timeout=60) as client:
                while not self.over.is_set():
                    (prompt, params), want = ASKS[self.answers % len(ASKS)], self.expected[self.answers % len(ASKS)]
                    stream = client.generate(**prompt, **params)
                    for _ in stream:
                        pass
                    got = whole(stream.result)
                    assert got == want, f"answer {self.answers}: {got} instead of {want}"
                    self.answers += 1
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"


@pytest.fixture
def beside(expected: list[tuple[Any, ...]]) -> Callable[..., Any]:
    """with beside(service): ... a bystander is served meanwhile, rightly; afterwards the worker is as it was."""

    @contextmanager
    def run(service: Any, wait_for: Callable[..., None]) -> Iterator[None]:
        with Client(service.endpoint) as client:
            client.ping()
        before = service.threads()
        bystander = Bystander(service.endpoint, expected)
        try:
            wait_for(lambda: bystander.answers >= len(ASKS) or bystander.problem, lambda: "the bystander's answers")
            yield
            wanted = bystander.answers + len(ASKS) + 1  # each once more, begun after the attack
            wait_for(lambda: bystander.answers >= wanted or bystander.problem, lambda: "its last answers")
        finally:
            bystander.over.set()
            bystander.thread.join(60)
        assert not bystander.problem, bystander.problem
        assert not bystander.thread.is_alive()
        assert service.alive(), service.errors()
        assert service.threads() == before
        assert "Traceback" not in service.errors(), service.errors()

    return run


class Attack:
    """One hostile client; counts what it was answered."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, seed: int, count: int, patience: float) -> None:
        self.source = Hostile(seed, CLIENTS)
        self.client = Raw(context, endpoint, SNDHWM=0, RCVHWM=0)
        self.count = count
        self.deadline = time.monotonic() + patience
        self.owed = self.terminals = 0
        self.once: set[bytes] = set()
        self.ends: Counter[bytes] = Counter()
        self.codes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.sent: dict[bytes, list[bytes]] = {}
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for _ in range(self.count):
                message = self.source.next()
                self.owed += message.answers
                if message.id is not None:
                    self.once.add(message.id)
                    self.sent[message.id] = message.frames
                self.client.frames(*message.frames)
                self._read(WINDOW)
            self._read(0)
            while not self.client.silent(QUIET_S):
                self._take()
            self._check()
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")

    def _read(self, window: int) -> None:
        """Read what came; then until at most `window` answers are owed."""
        while not self.client.silent(0) or self.owed - self.terminals > window:
            assert time.monotonic() < self.deadline, f"{self.owed - self.terminals} answers are missing"
            if not self.client.silent(1.0):
                self._take()

    def _take(self) -> None:
        request_id, reply = self.client.receive()
        if isinstance(reply, wire.Accepted | wire.Chunk):
            if self.ends[request_id]:
                self.problems.append(f"{type(reply).__name__} of {request_id!r} after its end")
            return
        if isinstance(reply, wire.End) and reply.more:
            return
        self.terminals += 1
        self.ends[request_id] += 1
        code = reply.code if isinstance(reply, wire.Error | wire.End) else None
        if code is not None:
            self.codes[code] += 1
            if code not in CODES or code == "internal":
                self.problems.append(f"{reply} to {self.sent.get(request_id)!r:.500}")

    def _check(self) -> None:
        for request_id in self.once:
            if self.ends[request_id] != 1:
                frames = self.sent[request_id]
                self.problems.append(f"{self.ends[request_id]} answers to {frames!r:.500}")
        if self.terminals != self.owed:
            self.problems.append(f"{self.terminals} answers to {self.owed} messages")


@pytest.mark.parametrize("seed", [0, 100])
def test_promise_one_terminal_reply_whatever_is_sent(
    serve: Callable[..., Any],
    beside: Callable[..., Any],
    wait_for: Callable[..., None],
    text_model: Path,
    scaled: Callable[[int], int],
    patience: float,
    seed: int,
) -> None:
    service = serve(text_model, engine=ENGINE, worker=LIMITS)
    context = zmq.Context()
    attacks: list[Attack] = []
    try:
        with beside(service, wait_for):
            attacks = [Attack(context, service.endpoint, seed + i, scaled(FRAMES), patience) for i in range(CLIENTS)]
            for attack in attacks:
                attack.thread.join(max(0.0, attack.deadline + 30 - time.monotonic()))
            assert not any(attack.thread.is_alive() for attack in attacks)
        problems = [problem for attack in attacks for problem in attack.problems]
        assert not problems, "\n".join(problems[:20])
        codes = sum((attack.codes for attack in attacks), Counter())
        for code in ("bad_version", "bad_frame", "unknown_type", "bad_field", "unsupported", "unknown_request"):
            assert codes[code], codes
        assert service.stop()["finished"] > scaled(FRAMES) / 10
    finally:
        for attack in attacks:
            attack.client.close()
        context.destroy(linger=0)


def speak(peer: socket.socket, hello: bytes, rest: bytes) -> bool:
    """Shake hands, say the rest; whether a message came back. The worker may hang up at any time: an answer too."""
    heard = b""
    try:
        peer.settimeout(30)
        peer.sendall(hello)
        peer.settimeout(PATIENCE_S)
        while b"READY" not in heard:
            if not (piece := peer.recv(65536)):
                return False
            heard += piece
        peer.settimeout(30)
        peer.sendall(rest)
        peer.settimeout(PATIENCE_S)
        return wire.PROTOCOL in peer.recv(65536)
    except (TimeoutError, BrokenPipeError, ConnectionResetError):
        return False


def test_promise_nothing_stalls_under_bytes_that_are_not_zeromq(
    serve: Callable[..., Any],
    beside: Callable[..., Any],
    wait_for: Callable[..., None],
    text_model: Path,
    scaled: Callable[[int], int],
) -> None:
    """Connections that begin and end anywhere in a handshake or a frame; their descriptors are given back."""
    service = serve(text_model, engine=ENGINE, worker=LIMITS)
    path = service.endpoint.removeprefix("ipc://")
    draw = random.Random(7)
    before = service.descriptors()
    answered = 0
    with beside(service, wait_for):
        open_ones: list[socket.socket] = []
        for _ in range(scaled(CONNECTIONS)):
            peer = socket.socket(socket.AF_UNIX)
            # Blocking, as otherwise a full backlog is an error; this is then its deadline.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 30, 0))
            peer.connect(path)
            open_ones.append(peer)
            answered += speak(peer, *connection(draw))
            if len(open_ones) > draw.randrange(40):
                open_ones.pop(draw.randrange(len(open_ones))).close()
        for peer in open_ones:
            peer.close()
    assert answered > scaled(CONNECTIONS) / 20
    wait_for(lambda: service.descriptors() <= before, lambda: f"{service.descriptors()} open files, {before} before")
    service.stop()
