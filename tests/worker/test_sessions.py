"""One terminal reply for each request, in any order of events: a seeded simulation without sockets or threads.

Outcomes, some of which cannot be sent, cancels, credit, connections that are slow, deaf or lost and the passing of time
come in random order; after each the replies that went out are checked, and at the end that nothing was left behind.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fake_engine import ids_of

from miro_client import wire
from miro_client.errors import QueueFull, RequestError, Restarted
from miro_cy.requests import Event, TokenLogprob, Usage
from miro_worker.config import WorkerConfig
from miro_worker.jobs import Admitted, Failed, Job, Stepped
from miro_worker.mailbox import Mailbox
from miro_worker.sessions import Sessions
from miro_worker.sockets import Peer, Sent
from miro_worker.streams import Stream

CONFIG = WorkerConfig(max_requests=6, max_peer_requests=4, max_reply_bytes=400, slow_client_ms=1000)


class FakeSocket:
    """Takes messages, or does not; keeps what was taken."""

    def __init__(self) -> None:
        self.all: list[Peer] = []
        self.room: dict[Peer, int] = {}  # messages it still takes
        self.lost: list[Peer] = []
        self.taken: dict[Peer, list[tuple[bytes, wire.Reply]]] = {}

    def send(self, peer: Peer, frames: list[bytes]) -> Sent:
        assert not peer.gone
        if self.room.get(peer, 1) <= 0:
            return Sent.BLOCKED
        if peer in self.room:
            self.room[peer] -= 1
        self.taken[peer].append(wire.decode_reply(frames))
        peer.sent += 1
        return Sent.OK

    def take_lost(self) -> list[Peer]:
        lost, self.lost = self.lost, []
        return lost

    def peers(self) -> list[Peer]:
        return [peer for peer in self.all if not peer.gone]


class NoText:
    """What no message can hold."""

    def __repr__(self) -> str:
        raise RuntimeError("it cannot even be shown")


#: What an engine may get wrong: fields of an event that cannot be encoded, or do not make sense.
GARBAGE: tuple[dict[str, Any], ...] = (
    {"text": "\ud800"},
    {"text": NoText()},
    {"tokens": [2**31]},
    {"tokens": [NoText()]},
    {"logprobs": [TokenLogprob(-1.0, [(2**64, -1.0)])]},
    {"logprobs": [NoText()]},
    {"prompt_logprobs": [None, NoText()]},
    {"choice": 99},
    {"choice": 0, "finish_reason": "length", "prompt_logprobs": [None, TokenLogprob(np.float32(-1), [])]},
    {"finish_reason": "stop", "stop": NoText()},
    {"finish_reason": "stop", "stop": "\udfff"},
    {"finish_reason": "length", "score": NoText()},
    {"finish_reason": "length", "usage": Usage(NoText(), 0, 1)},
    {"finish_reason": "length", "timing": NoText()},
    {"finish_reason": "error", "error": RequestError("\ud800")},
    {"finish_reason": "error", "error": NoText()},
)


#: What may happen, and how often.
WEIGHTS = {
    "connect": 1,
    "generate": 12,
    "admit": 14,
    "refuse": 1,
    "step": 45,
    "fail": 0.5,
    "garbage": 1,
    "garbled": 2,
    "cancel": 3,
    "credit": 5,
    "room": 8,
    "nonsense": 2,
    "time": 10,
    "vanish": 0.7,
}


class Simulation:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.socket = FakeSocket()
        self.sessions = Sessions(
            self.socket,
            CONFIG,
            fingerprint="f",
            texts=Mailbox(999),
            steps=Mailbox(9999),
            clock=lambda: self.now,
            awake=lambda: self.now,
        )
        self.delivery = self.sessions.delivery
        self.opened: dict[bytes, Peer] = {}
        self.choices: dict[bytes, int] = {}
        self.texts: dict[tuple[bytes, int], str] = {}
        self.waiting: list[Job] = []
        self.running: list[tuple[Job, int]] = []  # choices that have not ended
        self.dropped: set[Peer] = set()
        self.seen: Counter[str] = Counter()
        drop = self.delivery._drop
        self.delivery._drop = lambda peer: (self.dropped.add(peer), drop(peer))
        self.connect()

    def act(self) -> None:
        (name,) = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        getattr(self, name)()
        self.seen["starved"] += len(self.delivery._starved)
        self.seen["stalled"] += sum(len(peer.stalled) for peer in self.socket.peers())
        self.seen["dropped"] += len(self.dropped)

    def peer(self) -> Peer:
        return self.draw.choice(self.socket.peers())

    def stream(self) -> Stream | None:
        return self.draw.choice([s for peer in self.socket.peers() for s in peer.streams.values()] or [None])

    def connect(self) -> None:
        if len(self.socket.peers()) < 3:
            peer = Peer(b"r", len(self.socket.all), 1e9, 0.0)
            self.socket.all.append(peer)
            self.socket.taken[peer] = []

    def generate(self) -> None:
        peer, request_id, stream = self.peer(), len(self.opened).to_bytes(8, "big"), self.draw.random() < 0.8
        credit = self.draw.choice([None, None, 1, 2]) if stream else None
        n = self.draw.choice([1, 1, 2, 3])
        body = wire.Generate(prompt="ab", stream=stream, credit=credit, n=n)
        self.opened[request_id] = peer
        self.choices[request_id] = n
        self.texts |= {(request_id, choice): "" for choice in range(n)}
        try:
            self.sessions.open(peer, wire.Head(False, wire.Kind.GENERATE, request_id, b""), body)
        except QueueFull as error:
            self.seen["full"] += 1
            self.sessions.reply_error(peer, request_id, error, delimited=False)
        else:
            self.waiting += self.sessions._texts.take(wait=False)

    def admit(self) -> None:
        if self.waiting:
            job = self.waiting.pop(0)
            self.running += [(job, choice) for choice in range(job.choices)]
            self.sessions.on_outcome(Admitted(job, wire.pack_ids(ids_of("ab")), 1, 0.5))

    def refuse(self) -> None:
        if self.waiting:
            self.sessions.on_outcome(Failed(self.waiting.pop(0), QueueFull("full")))

    def step(self) -> None:
        if not self.running:
            return
        job, choice = self.draw.choice(self.running)
        text = self.draw.choice(["", "a", "é" * self.draw.randrange(20)])
        end = self.draw.choice([None] * 12 + ["stop", "length", "cancelled", "error"])
        if job in self.sessions._jobs:
            self.texts[self.sessions._jobs[job].id, choice] += text
        if end is not None:
            self.running.remove((job, choice))
        error = RequestError("e") if end == "error" else None
        usage = Usage(2, 0, 1)
        event = Event(1, choice, text, tokens=[1] * len(text), finish_reason=end, usage=usage, error=error)
        self.sessions.on_outcome(Stepped(job, event))

    def fail(self) -> None:
        """A step failed: its job ends, whichever of its choices have not."""
        if self.running:
            job, _ = self.draw.choice(self.running)
            self.running = [(other, choice) for other, choice in self.running if other is not job]
            self.sessions.on_outcome(Failed(job, RequestError("failed")))

    def garbage(self) -> None:
        """The engine tells something that cannot be sent: its request ends with that, if it does not go on as it is."""
        if self.running:
            job, choice = self.draw.choice(self.running)
            event = Event(1, **({"choice": choice, "tokens": [1]} | self.draw.choice(GARBAGE)))
            self.running = [(other, choice) for other, choice in self.running if other is not job]
            stream = self.sessions._jobs.get(job)
            self.sessions.on_outcome(Stepped(job, event))
            self.seen["garbage"] += stream is not None
            self.sessions.on_outcome(Failed(job, RequestError("the engine has given it up")))

    def garbled(self) -> None:
        """What the engine took cannot be told, or why it did not take it."""
        if self.waiting:
            told = self.draw.choice(
                [
                    lambda job: Admitted(job, wire.pack_ids(ids_of("ab")), 2**64, 0.5),
                    lambda job: Admitted(job, wire.pack_ids(ids_of("ab")), NoText(), 0.5),
                    lambda job: Failed(job, QueueFull("full", retry_after_ms=NoText())),
                    lambda job: Failed(job, RequestError("\ud800", field="\ud800")),
                ]
            )
            job = self.waiting.pop(0)
            self.seen["garbled"] += job in self.sessions._jobs
            self.sessions.on_outcome(told(job))
            self.sessions.on_outcome(Failed(job, RequestError("the engine has given it up")))

    def cancel(self) -> None:
        if stream := self.stream():
            self.sessions.cancel(stream)

    def credit(self) -> None:
        if stream := self.stream():
            self.delivery.add_credit(stream, 1)

    def room(self) -> None:
        self.socket.room[self.peer()] = self.draw.choice([0, 0, 1, 2, 1000, 1000])

    def nonsense(self) -> None:
        peer = self.peer()
        for _ in range(self.draw.randrange(5)):
            self.sessions.reply_error(peer, b"", QueueFull("nonsense"), delimited=False)

    def time(self) -> None:
        self.now += self.draw.choice([0.001, 0.1, 0.3, 1.1])
        self.delivery.tend()

    def vanish(self) -> None:
        if len(self.socket.peers()) > 1:
            peer = self.peer()
            peer.gone = True
            self.socket.lost.append(peer)
            self.sessions.bury()
            assert not peer.streams
            assert not any(stream.peer is peer for stream in self.sessions._jobs.values())

    def check_replies(self) -> None:
        for peer, taken in self.socket.taken.items():
            replies: dict[bytes, list[wire.Reply]] = {}
            for request_id, reply in taken:
                replies.setdefault(request_id, []).append(reply)
            for request_id, mine in replies.items():
                if not request_id:
                    continue
                assert self.opened[request_id] is peer
                self.check_one(request_id, mine)

    def check_one(self, request_id: bytes, mine: list[wire.Reply]) -> None:
        """One END a choice, none of its chunks behind it; all but the last say that there are more; or one ERROR."""
        assert not any(isinstance(reply, wire.Accepted) for reply in mine[1:])
        if isinstance(mine[-1], wire.Error):
            assert len(mine) == 1
            return
        chunks = [reply for reply in mine if isinstance(reply, wire.Chunk)]
        assert [chunk.s for chunk in chunks] == list(range(len(chunks)))
        ends = [reply for reply in mine if isinstance(reply, wire.End)]
        assert len({end.i for end in ends}) == len(ends) <= self.choices[request_id]
        if len(ends) == self.choices[request_id]:
            assert [end.more for end in ends] == [True] * (len(ends) - 1) + [False]
            assert mine[-1] is ends[-1]
        for end in ends:
            own = [reply for reply in mine if isinstance(reply, wire.Chunk | wire.End) and reply.i == end.i]
            assert own[-1] is end
            if end.reason in ("stop", "length"):
                self.seen["whole"] += len(ends) > 1
                assert "".join(reply.t or "" for reply in own) == self.texts[request_id, end.i]

    def check_bounds(self) -> None:
        for peer in self.socket.peers():
            assert peer.outbox_bytes <= CONFIG.max_reply_bytes
            assert peer.outbox_bytes == sum(len(frame) for frames in peer.outbox for frame in frames)
            assert len(peer.streams) <= CONFIG.max_peer_requests
            assert (peer.blocked_since is None) <= (not peer.outbox)
        waiting = [stream for stream in self.sessions._jobs.values() if not stream.admitted]
        assert self.sessions.admission._prompt_bytes == sum(stream.prompt_bytes for stream in waiting)
        assert len(self.sessions) <= CONFIG.max_requests

    def check_nothing_is_left_behind(self) -> None:
        """Once clients read again, what was finished ends; after a stop, everything has."""
        self.socket.room.clear()
        for _ in range(3):
            self.now += 0.3
            self.delivery.tend()
        for peer in self.socket.peers():
            for stream in peer.streams.values():
                assert stream.credit == 0 or not stream.waiting
        self.sessions.end_all(Restarted("stop"))
        assert not self.delivery.waiting
        assert len(self.sessions) == 0
        for request_id, peer in self.opened.items():
            if not peer.gone and peer not in self.dropped:
                mine = [reply for got, reply in self.socket.taken[peer] if got == request_id]
                ends = [reply for reply in mine if isinstance(reply, wire.End)]
                assert len(ends) == self.choices[request_id] or isinstance(mine[-1], wire.Error)
        tally = self.sessions.tally
        refused_here = sum(tally.refused.values())
        assert sum(tally.ended.values()) + refused_here + tally.abandoned + self.seen["full"] == len(self.opened)


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in (0, 50, 100, 150)])
def test_one_terminal_reply_whatever_happens(seeds):
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed)
        for _ in range(150):
            simulation.act()
            simulation.check_bounds()
        simulation.check_replies()
        simulation.check_nothing_is_left_behind()
        simulation.check_replies()
        seen += simulation.seen
    assert {"starved", "stalled", "dropped", "whole", "garbage", "garbled"} <= {
        name for name, count in seen.items() if count > 20
    }
