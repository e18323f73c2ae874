"""The control and admin sockets: questions about the worker, answered at once, from figures that wait for no step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from miro_client import wire
from miro_client.errors import InternalError, MiroError, RequestError, UnknownType, Unsupported
from miro_client.wire import Kind
from miro_worker.config import WorkerConfig
from miro_worker.delivery import Delivery
from miro_worker.sockets import Inbound, RouterSocket
from miro_worker.streams import Stream
from miro_worker.tally import Tally

log = logging.getLogger("miro.worker")

#: Answers what was asked, without waiting.
Answerer = Callable[[wire.Request], wire.Reply | wire.Answers]
#: Messages taken in one turn of the I/O loop.
MESSAGES_A_TURN = 16


class Desk:
    """One socket whose every message is a question with one answer. Owned by the I/O thread.

    answers: what it answers, by message type. Beside the data socket, so that a flood there does not delay it.
    clock: of its rate of messages; awake: of clients that take nothing.
    """

    def __init__(
        self,
        name: str,
        socket: RouterSocket,
        config: WorkerConfig,
        tally: Tally,
        answers: Mapping[Kind, Answerer],
        *,
        clock: Callable[[], float],
        awake: Callable[[], float],
    ) -> None:
        self.socket = socket
        self._name = name
        self._rate = config.messages_per_second
        self._tally = tally
        self._clock = clock
        self._answers = answers
        self.delivery = Delivery(socket, config, awake, _no_streams, tally)

    def turn(self) -> bool:
        """Answer what waits; True if there may be more."""
        self.socket.refresh()
        self.bury()
        for _ in range(MESSAGES_A_TURN):
            inbound = self.socket.receive(self._clock())
            if inbound is None:
                return self.socket.more
            self._handle(inbound)
        return True

    def bury(self) -> None:
        """Forget connections that ended."""
        for peer in self.socket.take_lost():
            self.delivery.forget(peer)

    def _handle(self, inbound: Inbound) -> None:
        head = wire.split(inbound.frames)
        self._tally.messages += 1
        answer: wire.Reply | wire.Answers
        try:
            inbound.peer.count_message(self._rate, self._clock())
            answer = self._answer(head)
        except RequestError as error:
            answer = self._refusal(error)
        except Exception:
            log.exception("a message of type 0x%02x failed", head.kind)
            answer = self._refusal(InternalError("the message could not be handled"))
        try:
            self.delivery.post(inbound.peer, head.id, answer, delimited=head.delimited)
        except (TypeError, ValueError, OverflowError):
            log.exception("an answer of type %s cannot be sent", type(answer).__name__)
            refusal = self._refusal(InternalError("the answer could not be sent"))
            self.delivery.post(inbound.peer, head.id, refusal, delimited=head.delimited)

    def _answer(self, head: wire.Head) -> wire.Reply | wire.Answers:
        if head.error is not None:
            raise head.error
        if head.kind >= Kind.WELCOME:
            raise UnknownType(f"{Kind(head.kind).name} is a worker's message")
        answer = self._answers.get(Kind(head.kind))
        if answer is None:
            raise Unsupported(f"{Kind(head.kind).name} is not answered on the {self._name} socket")
        return answer(wire.decode_request(head.kind, head.body))

    def _refusal(self, error: RequestError) -> wire.Error:
        self._tally.errors[error.code] += 1
        return wire.error_body(error)


def _no_streams(stream: Stream, error: MiroError) -> None:
    raise AssertionError("nothing is streamed here")
