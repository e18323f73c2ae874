"""The ROUTER socket, and which connection a message belongs to."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from miro_client.errors import RateLimited
from miro_worker.bind import IpcFile, bind_ipc
from miro_worker.config import WorkerConfig

if TYPE_CHECKING:
    from miro_worker.streams import Stream

#: Frames kept of one message: one more than a valid one has, so that it is seen to be too long.
MAX_FRAMES = 6
#: Frames read in one call, so that a message of millions of frames does not keep output waiting.
FRAMES_A_CALL = 512
#: Finished request ids remembered per peer, so that a late CANCEL is not called unknown.
MAX_FINISHED = 256
#: Messages ZeroMQ holds of one peer. Far above what a peer may send in a second, for a full queue is dangerous: a peer
#: that then sends a ZMTP PING and leaves makes libzmq 4.3.5 abort the process. Not without limit, for memory's sake.
RECEIVE_HWM = 100_000


class Sent(Enum):
    """What became of a message."""

    OK = 0
    BLOCKED = 1  # the peer does not take more now
    GONE = 2  # the connection is no more


class Peer:
    """One connection, from its first message until it is lost. Owned by the I/O thread."""

    def __init__(self, routing_id: bytes, fd: int, allowance: float, now: float) -> None:
        self.routing_id = routing_id
        self.fd = fd
        self.gone = False
        self.streams: dict[bytes, Stream] = {}
        self.finished: OrderedDict[bytes, None] = OrderedDict()
        self.prompt_bytes = 0
        self.sent = 0  # messages the connection took
        # Flow control (delivery.py).
        self.outbox: deque[list[bytes]] = deque()
        self.outbox_bytes = 0
        self.stalled: dict[Stream, None] = {}
        self.blocked_since: float | None = None
        self.given_up = False
        self.retry_at = 0.0
        self.retry_delay = 0.0
        # A token bucket of messages.
        self.allowance = allowance
        self.allowance_at = now

    def count_message(self, rate: int, now: float) -> None:
        """Count a message against the token bucket. Raises RateLimited."""
        self.allowance = min(2.0 * rate, self.allowance + (now - self.allowance_at) * rate)
        self.allowance_at = now
        if self.allowance < 1.0:
            wait_ms = int((1.0 - self.allowance) / rate * 1e3) + 1
            raise RateLimited(f"more than {rate} messages a second", retry_after_ms=wait_ms)
        self.allowance -= 1.0

    def finish(self, request_id: bytes) -> None:
        """Forget a request that is live, if it was; remember that there was one."""
        self.streams.pop(request_id, None)
        self.finished[request_id] = None
        self.finished.move_to_end(request_id)
        while len(self.finished) > MAX_FINISHED:
            self.finished.popitem(last=False)


class Inbound(NamedTuple):
    peer: Peer
    frames: list[bytes]


class RouterSocket:
    """ROUTER with MANDATORY and a monitor: messages come from, and go to, one certain connection.

    A routing id does not name a connection: a client chooses its own, and after a reconnection, or under another
    client's old id, a new connection answers to it. So a peer is (routing id, file descriptor), and the monitor tells
    when a descriptor's connection ends. Two orders of events in libzmq make this exact:
    a connection's ACCEPTED event is queued before its messages are, and its DISCONNECTED event before its routing id is
    free for another. Hence the monitor is read after a message was received, before it is attributed; and after the
    first frame of a reply was sent, which ties the rest of it to one pipe, before the contents are.
    """

    def __init__(
        self, context: zmq.Context[Any], endpoint: str | None, config: WorkerConfig, max_connections: int
    ) -> None:
        self._config = config
        self._max_connections = max_connections
        self.refused = 0  # connections beyond that
        self._connected: set[int] = set()
        self._peers: dict[int, dict[bytes, Peer]] = {}
        self._lost: list[Peer] = []
        self._file: IpcFile | None = None
        self._half_read: tuple[bytes, list[bytes]] | None = None  # routing id, frames kept
        self.strays = 0  # messages whose connection was already gone
        self.more = False  # whether `receive` stopped for its share of frames, not for want of them
        self.router = context.socket(zmq.ROUTER)
        self.monitor = context.socket(zmq.PAIR)
        try:
            self._set_options()
            address = f"inproc://miro-monitor-{id(self)}"
            self.router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self.monitor.setsockopt(zmq.LINGER, 0)
            # Unlimited: at a high-water mark libzmq's own I/O thread would wait for this one.
            self.monitor.setsockopt(zmq.RCVHWM, 0)
            self.monitor.connect(address)
            self.endpoint = bind_ipc(self.router, endpoint)
            self._file = IpcFile(self.endpoint)
        except BaseException:
            self.close()
            raise

    def _set_options(self) -> None:
        # No ZMTP heartbeats: libzmq aborts the process when one is due on a connection that was lost while its inbound
        # queue was full. On ipc the kernel reports the end of a peer at once.
        config = self._config
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, config.linger_ms),
            (zmq.MAXMSGSIZE, config.max_message_bytes),
            (zmq.SNDHWM, config.send_hwm),
            (zmq.RCVHWM, RECEIVE_HWM),
            (zmq.BACKLOG, min(1024, max(8, self._max_connections // 4))),
        ):
            self.router.setsockopt(option, value)

    def receive(self, now: float) -> Inbound | None:
        """The next message, without waiting; None if there is none, or not yet (`more`). Strays are skipped."""
        self.more = False
        for _ in range(FRAMES_A_CALL):
            try:
                frame = self.router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if self._half_read is None:
                self._half_read = (frame.bytes, [])
            elif len(self._half_read[1]) < MAX_FRAMES:
                self._half_read[1].append(frame.bytes)
            if frame.more:
                continue
            (routing_id, frames), self._half_read = self._half_read, None
            self.refresh()
            fd = _source(frame)
            if fd in self._connected:
                return Inbound(self._peer(routing_id, fd, now), frames)
            self.strays += 1
        self.more = True
        return None

    def _peer(self, routing_id: bytes, fd: int, now: float) -> Peer:
        peers = self._peers.setdefault(fd, {})
        peer = peers.get(routing_id)
        if peer is None:
            peer = peers[routing_id] = Peer(routing_id, fd, 2.0 * self._config.messages_per_second, now)
        return peer

    def send(self, peer: Peer, frames: Sequence[bytes]) -> Sent:
        """Send without waiting, to this connection or to nobody."""
        if peer.gone:
            return Sent.GONE
        try:
            self.router.send(peer.routing_id, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return Sent.BLOCKED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)
            return Sent.GONE
        self.refresh()
        if peer.gone:
            # Another connection may have taken the id: it gets an empty message, which clients ignore.
            self.router.send(b"", zmq.NOBLOCK)
            return Sent.GONE
        self.router.send_multipart(frames, zmq.NOBLOCK)
        peer.sent += 1
        return Sent.OK

    def refresh(self) -> None:
        """Read the monitor: connections that came and went."""
        while self.monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event, fd = struct.unpack("=Hi", self.monitor.recv_multipart()[0])
            # A new connection under a known descriptor means that the old one is over.
            for peer in self._peers.pop(fd, {}).values():
                self._lose(peer)
            if event == zmq.EVENT_ACCEPTED:
                self._connected.add(fd)
                if len(self._connected) > self._max_connections:
                    self.refused += 1
                    _hang_up(fd)
            else:
                self._connected.discard(fd)

    def take_lost(self) -> list[Peer]:
        """Peers whose connection ended since the last call; nothing can be sent to them any more."""
        lost, self._lost = self._lost, []
        return lost

    def peers(self) -> list[Peer]:
        return [peer for peers in self._peers.values() for peer in peers.values()]

    def close(self) -> None:
        """Close both sockets; what was sent leaves within linger_ms."""
        if self._file is not None:
            self._file.remove()
        self.router.disable_monitor()
        self.monitor.close()
        self.router.close()

    def _lose(self, peer: Peer) -> None:
        if not peer.gone:
            peer.gone = True
            self._lost.append(peer)
            peers = self._peers.get(peer.fd)
            if peers is not None and peers.get(peer.routing_id) is peer:
                del peers[peer.routing_id]


def _hang_up(fd: int) -> None:
    """End a connection that libzmq owns, as its peer could; libzmq closes the descriptor.

    Where they run out, libzmq 4.3.5 ends the process.
    """
    with contextlib.suppress(OSError):  # it is over already
        connection = socket.socket(fileno=fd)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()


def _source(frame: zmq.Frame) -> int:
    """The file descriptor a frame came over; -1 if libzmq does not say (a peer of before ZMTP 3)."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, TypeError):
        return -1
