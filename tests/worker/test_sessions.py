"""One terminal reply for each request, under every order of what can happen. A state machine without sockets or threads.

A model client counts terminal replies; outcomes, cancels, credit, slow and lost connections come in any order.
"""

from __future__ import annotations

from fake_engine import ids_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miro_client import wire
from miro_client.errors import QueueFull, RequestError, Restarted
from miro_cy.requests import Event, Usage
from miro_worker.config import WorkerConfig
from miro_worker.jobs import Admitted, Refused, Stepped
from miro_worker.mailbox import Mailbox
from miro_worker.sessions import Sessions
from miro_worker.sockets import Peer, Sent

CONFIG = WorkerConfig(max_requests=6, max_peer_requests=4, max_reply_bytes=400, slow_client_ms=1000)
CREDITS = st.sampled_from([None, None, 1, 2])


class FakeSocket:
    """Takes messages, or does not; keeps what was taken."""

    def __init__(self) -> None:
        self.all: list[Peer] = []
        self.full: set[Peer] = set()
        self.lost: list[Peer] = []
        self.taken: dict[Peer, list[tuple[bytes, wire.Reply]]] = {}

    def send(self, peer: Peer, frames: list[bytes]) -> Sent:
        assert not peer.gone
        if peer in self.full:
            return Sent.BLOCKED
        self.taken[peer].append(wire.decode_reply(frames))
        peer.sent += 1
        return Sent.OK

    def take_lost(self) -> list[Peer]:
        lost, self.lost = self.lost, []
        return lost

    def peers(self) -> list[Peer]:
        return [peer for peer in self.all if not peer.gone]


class Requests(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.socket = FakeSocket()
        self.sessions = Sessions(
            self.socket, CONFIG, fingerprint="f", texts=Mailbox(99), steps=Mailbox(99), clock=lambda: self.now
        )
        self.opened: dict[bytes, Peer] = {}
        self.jobs: list = []
        self.admitted_jobs: set = set()
        self.dropped_peers: set[Peer] = set()
        drop = self.sessions.delivery._drop
        self.sessions.delivery._drop = lambda peer: (self.dropped_peers.add(peer), drop(peer))
        self.connect()

    def peer(self, data) -> Peer:
        return data.draw(st.sampled_from(self.socket.peers()))

    @rule()
    def connect(self) -> None:
        if len(self.socket.peers()) < 3:
            peer = Peer(b"r", len(self.socket.all), 1e9, 0.0)
            self.socket.all.append(peer)
            self.socket.taken[peer] = []

    @rule(data=st.data(), stream=st.booleans(), credit=CREDITS)
    def generate(self, data, stream, credit) -> None:
        peer, request_id = self.peer(data), len(self.opened).to_bytes(8, "big")
        body = wire.Generate(prompt="ab", stream=stream, credit=credit if stream else None)
        self.opened[request_id] = peer
        try:
            self.sessions.open(peer, wire.Head(False, wire.Kind.GENERATE, request_id, b""), body)
        except QueueFull as error:
            self.sessions.reply_error(peer, request_id, error, delimited=False)
        else:
            self.jobs += self.sessions._texts.take(wait=False)

    def job(self, data):
        return data.draw(st.sampled_from(self.jobs))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def admit(self, data) -> None:
        job = self.job(data)
        if job not in self.admitted_jobs:  # the step thread does so once
            self.admitted_jobs.add(job)
            self.sessions.on_outcome(Admitted(job, wire.pack_ids(ids_of("ab")), 1, 0.5))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def refuse(self, data) -> None:
        self.sessions.on_outcome(Refused(self.job(data), QueueFull("full")))

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        text=st.text("abcé", max_size=60),
        end=st.sampled_from([None, None, None, "stop", "length", "cancelled", "error"]),
    )
    def step(self, data, text, end) -> None:
        job = self.job(data)
        if job in self.admitted_jobs:
            error = RequestError("e") if end == "error" else None
            event = Event(1, text=text, tokens=[1] * len(text), finish_reason=end, usage=Usage(2, 0, 1), error=error)
            self.sessions.on_outcome(Stepped(job, event))

    @rule(data=st.data())
    def cancel_or_credit(self, data) -> None:
        peer = self.peer(data)
        if peer.streams:
            stream = data.draw(st.sampled_from(list(peer.streams.values())))
            if data.draw(st.booleans()):
                self.sessions.cancel(stream)
            else:
                self.sessions.delivery.add_credit(stream, 1)

    @rule(data=st.data(), full=st.booleans())
    def slow_or_fast(self, data, full) -> None:
        peer = self.peer(data)
        (self.socket.full.add if full else self.socket.full.discard)(peer)

    @rule(seconds=st.sampled_from([0.001, 0.1, 0.3, 1.1]))
    def time_passes(self, seconds) -> None:
        self.now += seconds
        self.sessions.delivery.tend()

    @precondition(lambda self: len(self.socket.peers()) > 1)
    @rule(data=st.data())
    def vanish(self, data) -> None:
        peer = self.peer(data)
        peer.gone = True
        self.socket.lost.append(peer)
        self.sessions.bury()
        assert not peer.streams
        assert not any(stream.peer is peer for stream in self.sessions._jobs.values())

    @invariant()
    def replies_are_in_order(self) -> None:
        for peer, taken in self.socket.taken.items():
            for request_id, owner in self.opened.items():
                mine = [reply for got, reply in taken if got == request_id]
                ends = [reply for reply in mine if isinstance(reply, wire.End | wire.Error)]
                assert not mine or owner is peer
                assert len(ends) <= 1
                assert not ends or mine[-1] is ends[0]
                chunks = [reply.s for reply in mine if isinstance(reply, wire.Chunk)]
                assert chunks == list(range(len(chunks)))
                accepted = [isinstance(reply, wire.Accepted) for reply in mine]
                assert not any(accepted[1:])
                assert not (ends and isinstance(ends[0], wire.Error)) or len(mine) == 1

    @invariant()
    def what_waits_is_bounded(self) -> None:
        for peer in self.socket.peers():
            assert peer.outbox_bytes <= CONFIG.max_reply_bytes
            assert peer.outbox_bytes == sum(map(len, [frame for frames in peer.outbox for frame in frames]))
            assert len(peer.streams) <= CONFIG.max_peer_requests
        waiting = [stream for stream in self.sessions._jobs.values() if not stream.admitted]
        assert self.sessions.admission._prompt_bytes == sum(stream.prompt_bytes for stream in waiting)

    def teardown(self) -> None:
        """At a stop every request of a connection that takes its replies has had its terminal one, and time is free."""
        self.socket.full.clear()
        self.sessions.end_all(Restarted("stop"))
        for _ in range(3):
            self.now += 0.5
            self.sessions.delivery.tend()
        assert not self.sessions.delivery.waiting
        assert len(self.sessions) == 0
        for request_id, peer in self.opened.items():
            if peer.gone or peer in self.dropped_peers:
                continue
            ends = [1 for got, r in self.socket.taken[peer] if got == request_id and isinstance(r, wire.End | wire.Error)]
            assert len(ends) == 1, request_id
        self.replies_are_in_order()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
