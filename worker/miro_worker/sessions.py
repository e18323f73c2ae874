"""The life of requests as their clients see them: the one place where a request begins and ends.

A request is live from its GENERATE until the END of its last choice, or its ERROR, is handed to `Delivery`. `_jobs`
holds those of which some choice's ending is not decided: a job leaves it exactly then, and what the other threads say
about it afterwards is dropped. So there is one END for each choice or one ERROR, whatever happens at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from miro_client import wire
from miro_client.errors import InternalError, MiroError, TooLarge
from miro_worker.admission import Admission
from miro_worker.config import WorkerConfig
from miro_worker.delivery import Delivery, frames_of
from miro_worker.jobs import Abort, Admitted, Failed, Job, Outcome, Prepared, Stepped
from miro_worker.mailbox import Mailbox
from miro_worker.sockets import Peer, RouterSocket
from miro_worker.streams import Stream
from miro_worker.tally import Tally

log = logging.getLogger("miro.worker")


class Sessions:
    """Owned by the I/O thread; nothing here waits.

    clock: of requests and their rate; awake: of clients that take nothing.
    """

    def __init__(
        self,
        socket: RouterSocket,
        config: WorkerConfig,
        *,
        fingerprint: str,
        texts: Mailbox[Job],
        steps: Mailbox[Prepared | Abort],
        clock: Callable[[], float],
        awake: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._config = config
        self._fingerprint = fingerprint
        self._texts = texts
        self._steps = steps
        self._jobs: dict[Job, Stream] = {}
        self.tally = Tally()
        self.admission = Admission(config, clock)
        self.delivery = Delivery(socket, config, awake, self.give_up, self.tally)
        self.draining = False

    def __len__(self) -> int:
        """Requests whose ending is not decided."""
        return len(self._jobs)

    @property
    def unanswered(self) -> int:
        """Requests whose last message is not handed over: those, and the decided ones that wait for a slow client."""
        return sum(len(peer.streams) for peer in self._socket.peers())

    # --- beginning ---

    def open(self, peer: Peer, head: wire.Head, body: wire.Generate) -> None:
        """Begin a request. Raises RequestError if it is refused."""
        job, size = self.admission.admit(
            peer, body, delimited=head.delimited, live=len(self._jobs), draining=self.draining
        )
        stream = Stream(job, peer, head.id, body, delimited=head.delimited)
        if not self._texts.offer(job):
            raise self.admission.queue_full("too many prompts wait to be tokenised")
        self.admission.waits(stream, size)
        peer.finished.pop(head.id, None)
        peer.streams[head.id] = stream
        self._jobs[job] = stream

    # --- what the other threads say ---

    def on_outcome(self, outcome: Outcome) -> None:
        stream = self._jobs.get(outcome.job)
        if stream is None:
            return
        try:
            if isinstance(outcome, Failed):
                self.give_up(stream, outcome.error)
            elif isinstance(outcome, Admitted):
                self._admitted(stream, outcome)
            else:
                self._stepped(stream, outcome)
        except Exception:
            # An event that cannot be put on the wire: the engine's fault, and this request's alone.
            log.exception("an outcome could not be sent")
            self.give_up(stream, InternalError("the answer could not be sent"))

    def _admitted(self, stream: Stream, outcome: Admitted) -> None:
        self.admission.prepared(stream)
        stream.job.prompt = None
        stream.prompt_ids, stream.seed, stream.waited_ms = outcome.tokens, outcome.seed, outcome.waited_ms
        accepted = None
        if stream.streamed:
            accepted = frames_of(stream.id, stream.accepted(self._fingerprint), delimited=stream.delimited)
        stream.admitted = True  # from here on it has ENDs, before that an ERROR
        if accepted is not None:
            self.delivery.push(stream.peer, accepted)

    def _stepped(self, stream: Stream, outcome: Stepped) -> None:
        stream.absorb(outcome.event, self._fingerprint)
        if stream.decided:
            self._jobs.pop(stream.job, None)
        elif not stream.streamed and stream.unsent_bytes > self._config.max_reply_bytes:
            limit = self._config.max_reply_bytes
            self.give_up(stream, TooLarge(f"the answer exceeds {limit} bytes: stream it"))
            return
        self.delivery.advance(stream)

    # --- ending ---

    def cancel(self, stream: Stream) -> None:
        """The client wants no more. Ends at once, or with the next step if the engine runs it."""
        if stream.admitted and stream.job in self._jobs:
            if not stream.aborted:  # CANCEL is free, and may be repeated
                stream.aborted = True
                self._steps.push(Abort(stream.job))  # the engine's events bring the ENDs, with the usage
        elif not stream.decided:
            self._withdraw(stream)
            stream.end_with(stream.cancelled_end())
        stream.cancel_decided()
        self.delivery.advance(stream)

    def give_up(self, stream: Stream, error: MiroError) -> None:
        """End a request that the engine did not end: with ERROR before it was accepted, with END after."""
        if stream.closed:
            return
        self._withdraw(stream)
        if stream.admitted:
            stream.end_with(stream.failed_end(error))
            self.delivery.advance(stream)
        else:
            stream.close_all()
            self.tally.refused[error.code] += 1
            self.reply_error(stream.peer, stream.id, error, delimited=stream.delimited)

    def end_all(self, error: MiroError) -> None:
        """End everything that is live, also what is finished but waits for a slow client."""
        for peer in self._socket.peers():
            for stream in list(peer.streams.values()):
                self.give_up(stream, error)

    def bury(self) -> None:
        """Cancel the requests of peers whose connection ended; nobody is told."""
        for peer in self._socket.take_lost():
            for stream in peer.streams.values():
                self._withdraw(stream)
            self.tally.abandoned += len(peer.streams)
            peer.streams.clear()
            self.delivery.forget(peer)

    def _withdraw(self, stream: Stream) -> None:
        """Nobody waits for the job any more."""
        self.admission.prepared(stream)
        stream.job.cancelled = True
        stream.job.prompt = None
        if self._jobs.pop(stream.job, None) is not None:
            self._steps.push(Abort(stream.job))

    # --- replies ---

    def reply(self, peer: Peer, request_id: bytes, body: wire.Reply, *, delimited: bool) -> None:
        self.delivery.post(peer, request_id, body, delimited=delimited)

    def reply_error(self, peer: Peer, request_id: bytes, error: MiroError, *, delimited: bool) -> None:
        self.delivery.post_error(peer, request_id, error, delimited=delimited)
