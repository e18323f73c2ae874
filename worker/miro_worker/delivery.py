"""Flow control: how output reaches clients that are fast, slow or deaf, without waiting for any of them.

fast     everything leaves at once
blocked  ZeroMQ takes no more for this peer (EAGAIN): replies queue in its outbox, the output of its streams coalesces
         into their next CHUNK, and the peer is tried again after a growing delay
starved  the credit window of one stream is used up: the output of its choices coalesces until CREDIT comes
slow     blocked or starved for slow_client_ms, or more than max_reply_bytes wait: the requests end with slow_client
dropped  still blocked after as long again: the outbox is thrown away and counted

Time is the worker's awake time: while it is stopped, no client is slow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from miro_client import wire
from miro_client.errors import InternalError, MiroError, SlowClient
from miro_worker.config import WorkerConfig
from miro_worker.output import Output
from miro_worker.sockets import Peer, RouterSocket, Sent
from miro_worker.streams import Stream
from miro_worker.tally import Tally

log = logging.getLogger("miro.worker")

MIN_RETRY_S = 0.002
MAX_RETRY_S = 0.2


def frames_of(request_id: bytes, body: wire.Reply | wire.Answers, *, delimited: bool = False) -> list[bytes]:
    """A reply as it is sent. Raises InternalError for a body that cannot be encoded: before anything is taken as sent,
    so that what it would have ended can end otherwise.
    """
    try:
        frames = wire.encode(request_id, body)
    except Exception as error:  # a text that is none, a type of somebody else's: whatever the engine has come up with
        log.exception("a reply of type %s cannot be encoded", type(body).__name__)
        raise InternalError("the answer could not be encoded") from error
    return [b"", *frames] if delimited else frames


class Delivery:
    """Sends; `give_up(stream, error)` is called for streams whose client is too slow or whose output cannot be sent."""

    def __init__(
        self,
        socket: RouterSocket,
        config: WorkerConfig,
        clock: Callable[[], float],
        give_up: Callable[[Stream, MiroError], None],
        tally: Tally,
    ) -> None:
        self._socket = socket
        self._tally = tally
        self._config = config
        self._clock = clock
        self._give_up = give_up
        self._blocked: dict[Peer, None] = {}
        self._starved: dict[Stream, None] = {}

    def post(self, peer: Peer, request_id: bytes, body: wire.Reply | wire.Answers, *, delimited: bool) -> None:
        """Send a reply, or queue it behind the ones that wait. Raises InternalError as `frames_of`."""
        self.push(peer, frames_of(request_id, body, delimited=delimited))

    def post_error(self, peer: Peer, request_id: bytes, error: MiroError, *, delimited: bool) -> None:
        """Send an ERROR, or queue it; one that cannot be encoded becomes one that can."""
        try:
            frames = frames_of(request_id, wire.error_body(error), delimited=delimited)
        except InternalError as told:
            frames = frames_of(request_id, wire.error_body(told), delimited=delimited)
        self.push(peer, frames)

    def push(self, peer: Peer, frames: list[bytes]) -> None:
        """Send a reply's frames, or queue them behind the ones that wait."""
        if peer.gone:
            self._tally.dropped += 1
            return
        if peer.blocked_since is None:
            sent = self._socket.send(peer, frames)
            if sent is not Sent.BLOCKED:
                self._tally.dropped += sent is Sent.GONE
                return
            self._block(peer)
        peer.outbox.append(frames)
        peer.outbox_bytes += sum(map(len, frames))
        if peer.outbox_bytes > self._config.max_reply_bytes:
            self._drop(peer)

    def advance(self, stream: Stream) -> None:
        """Send what the choices of the stream have, longest waiting first, and the end of each when that was all.

        The first that cannot be sent makes the others wait behind it: what can leave is shared out between them. If
        something can never be sent, the request is given up.
        """
        try:
            self._advance(stream)
        except InternalError as error:
            self._give_up(stream, error)

    def _advance(self, stream: Stream) -> None:
        while stream.waiting and not (stream.closed or stream.peer.gone):
            output = next(iter(stream.waiting.values()))
            if stream.streamed and output.has_pieces and not self._send_chunk(stream, output):
                stream.peer.stalled[stream] = None
                if stream.unsent_bytes > self._config.max_reply_bytes:
                    self._give_up(stream, SlowClient("the client does not take its output"))
                return
            end = stream.end_of(output)
            frames = None if end is None else frames_of(stream.id, end, delimited=stream.delimited)
            stream.close(output)
            if stream.closed and end is not None:
                self._tally.ended[end.reason] += 1
                self._starved.pop(stream, None)
            if frames is not None:
                self.push(stream.peer, frames)
        stream.peer.stalled.pop(stream, None)

    def add_credit(self, stream: Stream, credit: int) -> None:
        """Widen the window. Ignored for a stream that has none."""
        if stream.credit is None:
            return
        stream.credit = min(stream.credit + credit, wire.MAX_CREDIT)
        stream.starved_since = None
        self._starved.pop(stream, None)
        self.advance(stream)

    def forget(self, peer: Peer) -> None:
        """The peer is gone: nothing of it stays here."""
        self._tally.dropped += len(peer.outbox)
        self._unblock(peer)
        for stream in [stream for stream in self._starved if stream.peer is peer]:
            del self._starved[stream]

    def tend(self) -> float | None:
        """Retry blocked peers and give up slow ones. Returns when to call again (awake time), None for not at all."""
        now = self._clock()
        for peer in list(self._blocked):
            if now >= peer.retry_at:
                self._retry(peer, now)
            if peer.blocked_since is not None and now >= peer.blocked_since + self._patience:
                self._too_slow(peer, now)
        for stream in list(self._starved):
            if stream.starved_since is not None and now >= stream.starved_since + self._patience:
                self._give_up(stream, SlowClient("no credit came for the output that waits"))
        times = [peer.retry_at for peer in self._blocked]
        times += [stream.starved_since + self._patience for stream in self._starved if stream.starved_since is not None]
        return min(times, default=None)

    @property
    def waiting(self) -> bool:
        """Whether output waits for some client."""
        return bool(self._blocked or self._starved)

    @property
    def _patience(self) -> float:
        return self._config.slow_client_ms / 1e3

    def _send_chunk(self, stream: Stream, output: Output) -> bool:
        """Send the pieces of a choice; false when they have to wait."""
        if stream.peer.blocked_since is not None:
            return False
        if stream.credit == 0:
            if stream.aborted:  # who cancels sends no more credit
                stream.cut(output)
                return True
            if stream.starved_since is None:
                stream.starved_since = self._clock()
                self._starved[stream] = None
            return False
        frames = frames_of(stream.id, output.chunk(stream.sequence))
        sent = self._socket.send(stream.peer, frames)
        if sent is Sent.OK:
            stream.chunk_sent(output)
        elif sent is Sent.BLOCKED:
            self._block(stream.peer)
        return sent is Sent.OK

    def _block(self, peer: Peer) -> None:
        now = self._clock()
        peer.blocked_since = now
        peer.retry_delay = MIN_RETRY_S
        peer.retry_at = now + MIN_RETRY_S
        self._blocked[peer] = None

    def _unblock(self, peer: Peer) -> None:
        peer.blocked_since = None
        peer.given_up = False
        peer.outbox.clear()
        peer.outbox_bytes = 0
        self._blocked.pop(peer, None)

    def _retry(self, peer: Peer, now: float) -> None:
        since, delay, sent_before = peer.blocked_since, peer.retry_delay, peer.sent
        while peer.outbox:
            sent = self._socket.send(peer, peer.outbox[0])
            if sent is Sent.GONE:
                return  # the I/O loop will call forget
            if sent is Sent.BLOCKED:
                break
            peer.outbox_bytes -= sum(map(len, peer.outbox.popleft()))
        if not peer.outbox:
            self._unblock(peer)
            for stream in list(peer.stalled):
                self.advance(stream)
        if peer.blocked_since is None:
            return
        # Still, or again, blocked. The clock of the slow runs from the last message that was taken.
        progress = peer.sent != sent_before
        peer.blocked_since = now if progress else since
        peer.retry_delay = MIN_RETRY_S if progress else min(2 * delay, MAX_RETRY_S)
        peer.retry_at = now + peer.retry_delay

    def _too_slow(self, peer: Peer, now: float) -> None:
        if peer.given_up or not peer.streams:
            self._drop(peer)
            return
        peer.given_up = True
        peer.blocked_since = now
        for stream in list(peer.streams.values()):
            self._give_up(stream, SlowClient("the client does not take its output"))

    def _drop(self, peer: Peer) -> None:
        """Throw the outbox away. The connection stays: after a PING the client sees that its requests are not live."""
        self._tally.dropped += len(peer.outbox)
        streams = list(peer.streams.values())
        self._unblock(peer)
        for stream in streams:
            self._give_up(stream, SlowClient("the client does not take its replies"))
