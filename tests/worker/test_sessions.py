"""One terminal reply for each request, in any order of events: a seeded simulation without sockets or threads.

Outcomes, cancels, credit, connections that are slow, deaf or lost and the passing of time come in random order; after
each the replies that went out are checked, and at the end that nothing was left behind.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_engine import ids_of

from miro_client import wire
from miro_client.errors import QueueFull, RequestError, Restarted
from miro_cy.requests import Event, Usage
from miro_worker.config import WorkerConfig
from miro_worker.jobs import Admitted, Job, Refused, Stepped
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


#: What may happen, and how often.
WEIGHTS = {
    "connect": 1,
    "generate": 12,
    "admit": 14,
    "refuse": 1,
    "step": 30,
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
            self.socket, CONFIG, fingerprint="f", texts=Mailbox(999), steps=Mailbox(9999), clock=lambda: self.now
        )
        self.delivery = self.sessions.delivery
        self.opened: dict[bytes, Peer] = {}
        self.texts: dict[bytes, str] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
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
        body = wire.Generate(prompt="ab", stream=stream, credit=credit)
        self.opened[request_id] = peer
        self.texts[request_id] = ""
        try:
            self.sessions.open(peer, wire.Head(False, wire.Kind.GENERATE, request_id, b""), body)
        except QueueFull as error:
            self.sessions.reply_error(peer, request_id, error, delimited=False)
        else:
            self.waiting += self.sessions._texts.take(wait=False)

    def admit(self) -> None:
        if self.waiting:
            self.running.append(self.waiting.pop(0))
            self.sessions.on_outcome(Admitted(self.running[-1], wire.pack_ids(ids_of("ab")), 1, 0.5))

    def refuse(self) -> None:
        if self.waiting:
            self.sessions.on_outcome(Refused(self.waiting.pop(0), QueueFull("full")))

    def step(self) -> None:
        if not self.running:
            return
        job = self.draw.choice(self.running)
        text = self.draw.choice(["", "a", "é" * self.draw.randrange(20)])
        end = self.draw.choice([None] * 12 + ["stop", "length", "cancelled", "error"])
        if job in self.sessions._jobs:
            self.texts[self.sessions._jobs[job].id] += text
        if end is not None:
            self.running.remove(job)
        error = RequestError("e") if end == "error" else None
        event = Event(1, text=text, tokens=[1] * len(text), finish_reason=end, usage=Usage(2, 0, 1), error=error)
        self.sessions.on_outcome(Stepped(job, event))

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
                *before, last = mine
                assert not any(isinstance(reply, wire.End | wire.Error) for reply in before)
                assert not isinstance(last, wire.Error) or not before
                assert not any(isinstance(reply, wire.Accepted) for reply in mine[1:])
                chunks = [reply for reply in mine if isinstance(reply, wire.Chunk)]
                assert [chunk.s for chunk in chunks] == list(range(len(chunks)))
                if isinstance(last, wire.End) and last.reason in ("stop", "length"):
                    assert "".join(chunk.t for chunk in chunks) + (last.t or "") == self.texts[request_id]

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
                assert stream.credit == 0 or stream.end is None
                assert stream.credit == 0 or not (stream.streamed and stream.has_output)
        self.sessions.end_all(Restarted("stop"))
        assert not self.delivery.waiting
        assert len(self.sessions) == 0
        for request_id, peer in self.opened.items():
            if not peer.gone and peer not in self.dropped:
                mine = [reply for got, reply in self.socket.taken[peer] if got == request_id]
                assert isinstance(mine[-1], wire.End | wire.Error)


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
    assert {"starved", "stalled", "dropped"} <= {name for name, count in seen.items() if count > 20}
