"""Starting and stopping a worker: three threads around one engine."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import zmq

from miro_client import __version__, wire
from miro_client.awake import AwakeClock, join_all
from miro_client.endpoint import admin_endpoint, control_endpoint
from miro_client.errors import ConfigError
from miro_client.wire import Kind
from miro_worker.config import WorkerConfig
from miro_worker.control import Desk
from miro_worker.dispatch import Dispatcher
from miro_worker.io_loop import IOLoop
from miro_worker.jobs import Abort, Job, Outcome, Prepared
from miro_worker.mailbox import Mailbox, Wakeup
from miro_worker.reports import Reports
from miro_worker.sessions import Sessions
from miro_worker.sockets import RouterSocket
from miro_worker.step_loop import StepEngine, StepLoop
from miro_worker.text_loop import TextLoop

log = logging.getLogger("miro.worker")

#: Outcomes that may wait for the I/O thread before the others wait for it.
MAX_OUTCOMES = 4096
#: How long a stop waits, beyond the grace, for the engine to come out of its last step or its last prompt.
ENGINE_STOP_S = 10.0
#: And for the I/O thread to send what it has.
IO_STOP_S = 5.0


class Worker:
    """Serves one engine on an ipc socket.

    The engine belongs to the caller, who closes it after `stop`; until then only the worker's threads may use it.
    `bind` is an ipc:// endpoint; None means `miro_client.default_endpoint()`. A context manager: start and stop.
    """

    def __init__(self, engine: StepEngine, bind: str | None = None, *, config: WorkerConfig | None = None) -> None:
        self._engine = engine
        self._bind = bind
        self.config = config or WorkerConfig()
        self.error: BaseException | None = None  # what ended the worker, if it was not asked to stop
        self._context: zmq.Context[Any] | None = None
        self._sockets: list[RouterSocket] = []  # data, control, admin
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._ended = Wakeup()  # set when the I/O thread is over
        self._warm = Wakeup()  # set when the engine has generated its first token

    @property
    def endpoint(self) -> str:
        """Where it listens. Raises ConfigError before `start`."""
        if not self._sockets:
            raise ConfigError("the worker is not started")
        return self._sockets[0].endpoint

    def start(self) -> Self:
        """Bind and begin to serve; clients can connect when it returns. Raises ConfigError if binding fails.

        Requests are served, and health is green, once the engine has generated a first token.
        """
        if self._threads:
            raise ConfigError("a worker can be started only once")
        # One ZeroMQ thread: the order of monitor events and messages depends on it (sockets.py).
        self._context = zmq.Context(io_threads=1)
        try:
            self._open(self._context)
        except BaseException:
            for socket in self._sockets:
                socket.close()
            self._sockets = []
            self._context.term()
            raise
        self._build(*self._sockets)
        for name, run in (("io", self._io.run), ("text", self._text.run), ("step", self._step.run)):
            thread = threading.Thread(target=self._guard, args=(name, run), name=f"miro-{name}", daemon=True)
            self._threads[name] = thread
        for thread in self._threads.values():
            thread.start()
        return self

    def _open(self, context: zmq.Context[Any]) -> None:
        share = max(1, self.config.max_connections // 8)
        data = max(1, self.config.max_connections - 2 * share)
        self._sockets.append(RouterSocket(context, self._bind, self.config, data))
        for endpoint in (control_endpoint(self.endpoint), admin_endpoint(self.endpoint)):
            self._sockets.append(RouterSocket(context, endpoint, self.config, share))

    def _build(self, data: RouterSocket, control: RouterSocket, admin: RouterSocket) -> None:
        config, wakeup, clock, awake, engine = self.config, Wakeup(), time.monotonic, AwakeClock(), self._engine
        outcomes: Mailbox[Outcome] = Mailbox(MAX_OUTCOMES, wakeup.set)
        self._texts: Mailbox[Job] = Mailbox(config.max_requests)
        self._steps: Mailbox[Prepared | Abort] = Mailbox(config.max_requests)
        self._text = TextLoop(engine, self._texts, self._steps, outcomes, config.max_reply_bytes)
        self._step = StepLoop(engine, self._steps, outcomes, on_fatal=self._fail, on_warm=self._warm.set)
        sessions = Sessions(
            data,
            config,
            fingerprint=engine.fingerprint,
            texts=self._texts,
            steps=self._steps,
            clock=clock,
            awake=awake,
        )
        welcome = wire.Welcome(
            minor=wire.MINOR,
            server=f"miro {__version__}",
            model=engine.name,
            context=engine.context,
            limits=sessions.admission.limits,
            epoch=int.from_bytes(os.urandom(8)) >> 11,  # 53 bits: exact in JavaScript too
            fingerprint=engine.fingerprint,
        )
        self._reports = Reports(
            config,
            welcome.epoch,
            wire.ModelsReply(models=[wire.ModelInfo(**engine.describe())]),
            sessions=sessions,
            socket=data,
            text=self._text,
            step=self._step,
            texts=self._texts,
            steps=self._steps,
        )
        dispatcher = Dispatcher(sessions, welcome=welcome, pong=self._reports.pong)
        answers = self._reports.answers()
        for_admin = {**answers, Kind.DRAIN: self._drain}
        desks = [
            Desk("control", control, config, sessions.tally, answers, clock=clock, awake=awake),
            Desk("admin", admin, config, sessions.tally, for_admin, clock=clock, awake=awake),
        ]
        self._io = IOLoop(data, sessions, dispatcher, desks, wakeup=wakeup, outcomes=outcomes, awake=awake)

    def _drain(self, body: wire.Request) -> wire.DrainReply:
        live = self._reports.stats().live
        self.request_stop(body.grace_ms if isinstance(body, wire.Drain) else None)
        return wire.DrainReply(live=live)

    def request_stop(self, grace_ms: int | None = None) -> None:
        """Begin to drain and return at once. Safe in a signal handler. A second call can only shorten the grace."""
        if self._threads:
            self._io.request_stop((self.config.grace_ms if grace_ms is None else grace_ms) / 1e3)

    def stop(self, grace_ms: int | None = None) -> bool:
        """Drain within the grace time, end what is left with code=restarted, close. Idempotent, from any thread.

        Returns within grace_ms + linger_ms + a few seconds, even if the engine hangs; False then, and the engine must
        not be closed or used.
        """
        if not self._threads:
            return True
        grace = (self.config.grace_ms if grace_ms is None else grace_ms) / 1e3
        self.request_stop(grace_ms)
        with self._lock:
            join_all([self._threads["io"]], grace + IO_STOP_S)
            return self._close()

    def join(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until the worker no longer serves; True if so."""
        if self._threads:
            self._threads["io"].join(timeout)
            return not self._threads["io"].is_alive()
        return True

    def run(self, on_ready: Callable[[], None] | None = None, *, final: bool = False) -> int:
        """Start, serve until SIGTERM, SIGINT or DRAIN, stop. A second signal ends the grace time. Main thread only.

        on_ready is called once the engine has generated a first token. final: the process ends with this call, so that
        these signals stay without effect from then on: one sent twice is no reason to end as if it had been killed.

        Returns the exit code: 0 after a clean stop, 1 if the engine failed or hung.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.request_stop(0 if signals else None)
            signals.append(number)

        signals: list[int] = []
        # The kernel may hand a signal to any thread. Python then runs the handler in this one, but only once something
        # wakes it, and waiting for a thread is not interrupted by that: so wait for a descriptor it writes to.
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            if signals:  # one that came before there was anything to stop
                self.request_stop(None)
            waiting = on_ready is not None
            while not self.join(0):
                select.select([reader, self._ended.fileno(), *[self._warm.fileno()] * waiting], [], [])
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 4096)
                if self._ended.is_set:
                    self.join()
                elif waiting and on_ready is not None and self._warm.is_set:
                    waiting = False
                    on_ready()
            clean = self.stop(0)
        finally:
            for number, handler in previous.items():
                # Ignored, not handled: the interpreter takes handlers back a while before it has ended.
                signal.signal(number, signal.SIG_IGN if final else handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(reader)
            os.close(writer)
        return 0 if clean and self.error is None else 1

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _close(self) -> bool:
        """After the I/O thread: let the other threads go, free the sockets' context."""
        self._texts.close()
        self._steps.close()
        others = [thread for thread in self._threads.values() if thread is not threading.current_thread()]
        join_all(others, ENGINE_STOP_S)
        alive = [name for name, thread in self._threads.items() if thread.is_alive()]
        if alive:
            log.error("did not stop in time: %s", ", ".join(alive))
        if "io" not in alive and self._context is not None:
            # The sockets are closed: this waits for the linger time at most.
            self._context.term()
            self._context = None
        return not alive

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._reports.failed = True
        self._io.request_stop(0.0)

    def _guard(self, name: str, run: Callable[[], None]) -> None:
        """A thread that dies takes the worker with it: half a worker would accept requests and never answer."""
        try:
            run()
        except Exception as error:
            log.exception("the %s thread failed", name)
            self._fail(error)
        finally:
            if name == "io":
                self._ended.set()
