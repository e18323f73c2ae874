"""What the worker says of itself. The I/O thread asks; nothing here waits for another thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from miro_client import wire
from miro_client.wire import Kind
from miro_worker.config import WorkerConfig
from miro_worker.control import Answerer
from miro_worker.jobs import Abort, Job, Prepared
from miro_worker.mailbox import Mailbox
from miro_worker.sessions import Sessions
from miro_worker.sockets import RouterSocket
from miro_worker.step_loop import StepLoop
from miro_worker.text_loop import TextLoop


class Reports:
    """Bodies of PONG, STATS, HEALTH and MODELS. The engine's figures are those after its last step."""

    def __init__(
        self,
        config: WorkerConfig,
        epoch: int,
        models: wire.ModelsReply,
        *,
        sessions: Sessions,
        socket: RouterSocket,
        text: TextLoop,
        step: StepLoop,
        texts: Mailbox[Job],
        steps: Mailbox[Prepared | Abort],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._models = models
        self._sessions = sessions
        self._socket = socket
        self._text = text
        self._step = step
        self._texts = texts
        self._steps = steps
        self._clock = clock
        self._started = clock()
        self.failed = False

    def answers(self) -> dict[Kind, Answerer]:
        """What the control socket answers."""
        return {
            Kind.PING: lambda body: self.pong([], body.echo if isinstance(body, wire.Ping) else None),
            Kind.STATS: lambda _: self.stats(),
            Kind.HEALTH: lambda _: self.health(),
            Kind.MODELS: lambda _: self._models,
        }

    def pong(self, live: list[bytes], echo: Any) -> wire.Pong:
        gauges = self._gauges()
        return wire.Pong(
            epoch=self._epoch,
            running=gauges["running"],
            waiting=gauges["waiting"] + gauges["preparing"],
            free_blocks=gauges["free_blocks"] + gauges["cached_blocks"],
            last_step_age_ms=self._step.step_age_ms(),
            live=live,
            echo=echo,
        )

    def health(self) -> wire.HealthReply:
        stalled_ms = max(self._step.step_age_ms(), self._text.busy_ms())
        stalled = stalled_ms > self._config.stalled_ms
        if self.failed:
            status = "failed"
        elif self._sessions.draining:
            status = "draining"
        elif not self._step.warm:
            status = "starting"
        else:
            status = "stalled" if stalled else "ok"
        return wire.HealthReply(
            status=status,
            ready=status == "ok",
            epoch=self._epoch,
            uptime_ms=self._uptime_ms(),
            live=len(self._sessions),
            last_step_age_ms=self._step.step_age_ms(),
            stalled_ms=stalled_ms if stalled else 0.0,
        )

    def stats(self) -> wire.StatsReply:
        tally = self._sessions.tally
        return wire.StatsReply(
            epoch=self._epoch,
            uptime_ms=self._uptime_ms(),
            messages=tally.messages,
            requests=tally.requests,
            live=self._sessions.unanswered,
            ended=dict(tally.ended),
            refused=dict(tally.refused),
            abandoned=tally.abandoned,
            errors=dict(tally.errors),
            dropped=tally.dropped,
            strays=self._socket.strays,
            peers=len(self._socket.peers()),
            last_step_age_ms=self._step.step_age_ms(),
            resident_bytes=_resident_bytes(),
            **self._gauges(),
        )

    def _gauges(self) -> dict[str, int]:
        stats = self._step.snapshot
        names = ("running", "free_blocks", "cached_blocks", "total_blocks", "preemptions", "steps")
        tokens = ("prompt_tokens", "cached_tokens", "generated_tokens")
        gauges = {name: int(stats.get(name, 0)) for name in (*names, *tokens)}
        gauges["waiting"] = int(stats.get("waiting", 0)) + len(self._steps)
        gauges["preparing"] = len(self._texts)
        return gauges

    def _uptime_ms(self) -> float:
        return (self._clock() - self._started) * 1e3


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
