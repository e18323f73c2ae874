"""One client's connection: a thread that owns a DEALER socket and sorts replies by request.

The thread makes a client usable from any thread, lets several streams of one client run side by side, and lets an
iterator be cancelled from wherever the garbage collector drops it. It sleeps when nothing is sent or awaited.

A request belongs to the connection it was sent on: when that is lost, the worker forgets the request, and it fails here
with ConnectionLost. The socket is then replaced, so that nothing that was queued reaches a worker that comes up later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
from collections import deque
from typing import Any

import zmq

from miro_client import wire
from miro_client.awake import TICK_MS, AwakeClock
from miro_client.call import Call, ThreadInbox
from miro_client.checks import shown
from miro_client.errors import ConfigError, ConnectionLost, MiroError, SlowClient

#: How long to try to reach a worker before requests fail.
CONNECT_S = 5.0
#: When nothing came for so long while something is awaited, ask whether the worker still knows of it...
PROBE_S = 5.0
#: ...and when nothing came for so long, it is lost.
LOST_S = 20.0
#: After a disconnection, how long to wait for libzmq to say that all received messages are delivered.
SETTLE_S = 0.5
MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_numbers = itertools.count()


class Connection:
    """The thread and its socket. Methods may be called from any thread; none of them waits for the worker."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._commands: deque[tuple[str, Call]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pid = os.getpid()
        self._closing = False
        self._closed = False
        self._gate = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        try:
            self._open_socket()
        except zmq.ZMQError as error:
            self._context.term()
            # Not error.strerror, which repeats the endpoint.
            reason = zmq.strerror(error.errno or 0)
            raise ConfigError(f"bad endpoint {shown(endpoint, 200)}: {reason}", field="endpoint") from None
        self._calls: dict[bytes, Call] = {}
        self._unsent: dict[bytes, Call] = {}
        self._clock = AwakeClock()  # the thread's
        self._heard_at = self._clock()
        self._probe: Call | None = None
        self._thread = threading.Thread(target=self._guard, name="miro-client", daemon=True)
        self._thread.start()

    # --- any thread ---

    def start(self, call: Call) -> None:
        """Send a request; its replies come to call.inbox. Raises ConnectionLost when closed."""
        self.check_process()
        # The gate keeps a call from slipping in behind the thread's last look at the commands.
        with self._gate:
            if self._closed:
                raise ConnectionLost("the client is closed")
            self._commands.append(("start", call))
        self._wake_up()

    def check_process(self) -> None:
        """Raise ConnectionLost in a forked process, which has no thread to wait for."""
        if os.getpid() != self._pid:
            raise ConnectionLost("the client was made in the process this one was forked from; make a new one")

    def cancel(self, call: Call) -> None:
        """Tell the worker to stop. Takes no lock: the garbage collector may call it."""
        if not self._closed:
            self._commands.append(("cancel", call))
            self._wake_up()

    def close(self, timeout: float = 2.0) -> None:
        """Fail what is awaited, close the socket, end the thread. Idempotent."""
        self._closing = True
        self._wake_up()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _wake_up(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)

    # --- the thread ---

    def _guard(self) -> None:
        error: MiroError = ConnectionLost("the client is closed")
        try:
            self._run()
        except Exception as unexpected:  # a bug here must not leave callers waiting
            error = ConnectionLost(f"the client's thread failed: {shown(unexpected, 200)}")
        with self._gate:
            self._closed = True
        while self._commands:
            call = self._commands.popleft()[1]
            self._forget(call)
            call.inbox.put(error)
        self._fail(error)
        self._close_socket()
        self._context.term()

    def _run(self) -> None:
        while not self._closing:
            self._take_commands()
            self._flush()
            self._poller.poll(self._timeout_ms())
            self._clock.tick()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._receive()
            self._watch_connection()
            self._watch_time()
        # What still runs needs no CANCEL: the worker sees the connection end.

    def _open_socket(self) -> None:
        self._dealer = self._context.socket(zmq.DEALER)
        self._monitor = self._context.socket(zmq.PAIR)
        try:
            # No ZMTP heartbeats, which libzmq may not survive in a worker whose queue is full; our own PING probes.
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.SNDHWM, 0),
                (zmq.RCVHWM, 0),
                (zmq.RECONNECT_IVL, 50),
                (zmq.RECONNECT_IVL_MAX, 1_000),
            ):
                self._dealer.setsockopt(option, value)
            address = f"inproc://miro-client-{next(_numbers)}"
            self._dealer.monitor(address, MONITORED)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)
            self._monitor.connect(address)
            self._dealer.connect(self._endpoint)
        except BaseException:
            self._close_socket()
            raise
        self._connected = False
        self._lost_at: float | None = None
        self._poller = zmq.Poller()
        for source in (self._dealer, self._monitor, self._wake):
            self._poller.register(source, zmq.POLLIN)

    def _close_socket(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close()
        self._dealer.close()

    def _take_commands(self) -> None:
        while self._commands:
            command, call = self._commands.popleft()
            if command == "start":
                if not self._calls:
                    self._heard_at = self._clock()
                call.connect_by = self._clock() + CONNECT_S
                self._calls[call.id] = call
                self._unsent[call.id] = call
            elif call.id in self._calls:
                self._cancel(call)

    def _cancel(self, call: Call) -> None:
        """The caller has no use for more replies."""
        call.cancelled = True
        if not (call.sent and call.generates):
            self._forget(call)
        elif self._connected:
            self._send(wire.encode(call.id, wire.Cancel()))

    def _flush(self) -> None:
        """Send what waits for the connection. Nothing is given to ZeroMQ before there is one."""
        if not self._connected:
            return
        unsent, self._unsent = self._unsent, {}
        for call in unsent.values():
            self._send(call.frames)
            call.sent = True
            call.frames = []

    def _send(self, frames: list[bytes]) -> None:
        self._dealer.send_multipart(frames, zmq.NOBLOCK)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = self._clock()
            try:
                request_id, reply = wire.decode_reply(frames)
            except MiroError:
                continue  # not for this version; what is missing because of it shows as a gap or in a probe
            call = self._calls.get(request_id)
            if call is None:
                continue
            if call is self._probe:
                self._probed(reply)
                continue
            if not (isinstance(reply, wire.Accepted | wire.Chunk) or (isinstance(reply, wire.End) and reply.more)):
                self._forget(call)
            if not call.cancelled:
                self._deliver(call, reply, sum(map(len, frames)))

    def _deliver(self, call: Call, reply: wire.Reply, size: int) -> None:
        if call.inbox.full and isinstance(reply, wire.Chunk):
            self._cancel(call)
            call.inbox.put(SlowClient("the answer was cancelled: too much of it waited to be read"))
        else:
            call.inbox.put(reply, size)

    def _watch_connection(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = struct.unpack("=Hi", self._monitor.recv_multipart()[0])[0]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._lost_at is None:
                self._connected = True
                self._heard_at = self._clock()
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                self._connected = False
                self._lost_at = self._clock()
            elif self._lost_at is not None:
                # What follows a disconnection follows also the delivery of all that was received before it.
                self._reconnect("the worker closed the connection")
                return

    def _watch_time(self) -> None:
        now = self._clock()
        if self._lost_at is not None and now >= self._lost_at + SETTLE_S:
            self._reconnect("the worker closed the connection")
        if not self._connected:
            for call in [call for call in self._calls.values() if not call.sent and now >= call.connect_by]:
                self._forget(call)
                call.inbox.put(ConnectionLost(f"no worker answers at {self._endpoint} (is miro serve running?)"))
            return
        if not any(call.sent for call in self._calls.values()):
            return
        if now >= self._heard_at + LOST_S:
            self._reconnect(f"the worker has been silent for {LOST_S:.0f} s")
        elif self._probe is None and now >= self._heard_at + PROBE_S:
            self._probe = Call(wire.Ping(), ThreadInbox())
            for call in self._calls.values():
                call.probed = call.sent and call.generates
            self._calls[self._probe.id] = self._probe
            self._unsent[self._probe.id] = self._probe
            self._flush()

    def _timeout_ms(self) -> int | None:
        """How long to sleep; None, until something happens, when nothing is awaited."""
        times = [] if self._lost_at is None else [self._lost_at + SETTLE_S]
        if not self._connected:
            times += [call.connect_by for call in self._calls.values() if not call.sent]
        elif self._calls:
            times.append(self._heard_at + (PROBE_S if self._probe is None else LOST_S))
        return min(TICK_MS, max(0, int((min(times) - self._clock()) * 1e3) + 1)) if times else None

    def _probed(self, reply: wire.Reply) -> None:
        """Requests the worker does not know any more have lost their END."""
        if self._probe is not None:
            self._forget(self._probe)
            self._probe = None
        if not isinstance(reply, wire.Pong):
            return
        live = set(reply.live)
        for call in [call for call in self._calls.values() if call.probed and call.id not in live]:
            self._forget(call)
            call.inbox.put(ConnectionLost("the worker no longer knows the request"))

    def _reconnect(self, reason: str) -> None:
        """The connection is lost: deliver what came over it, fail what was sent on it, start a new one."""
        self._receive()
        self._probe = None
        for call in [call for call in self._calls.values() if call.sent]:
            self._forget(call)
            call.inbox.put(ConnectionLost(reason))
        self._close_socket()
        self._open_socket()

    def _fail(self, error: MiroError) -> None:
        for call in list(self._calls.values()):
            self._forget(call)
            call.inbox.put(error)

    def _forget(self, call: Call) -> None:
        """Nothing more is sent for it, and what it would have sent takes no memory."""
        self._calls.pop(call.id, None)
        self._unsent.pop(call.id, None)
        call.frames = []

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._wake)
