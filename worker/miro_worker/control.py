"""The control and admin sockets: questions about the worker, answered at once, from figures that wait for no step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from miro_client import wire
from miro_client.errors import InternalError, MiroError, RequestError, UnknownType, Unsupported
from miro_client.wire import Kind
from miro_worker.config import WorkerConfig
from miro_worker.delivery import Delivery
from miro_worker.sockets import Inbound, Peer, RouterSocket
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
        try:
            inbound.peer.count_message(self._rate, self._clock())
            self.delivery.post(inbound.peer, head.id, self._answer(head), delimited=head.delimited)
        except RequestError as error:
            self._refuse(inbound.peer, head, error)
        except Exception:
            log.exception("a message of type 0x%02x failed", head.kind)
            self._refuse(inbound.peer, head, InternalError("the message could not be handled"))

    def _answer(self, head: wire.Head) -> wire.Reply | wire.Answers:
        if head.error is not None:
            raise head.error
        if head.kind >= Kind.WELCOME:
            raise UnknownType(f"{Kind(head.kind).name} is a worker's message")
        answer = self._answers.get(Kind(head.kind))
        if answer is None:
            raise Unsupported(f"{Kind(head.kind).name} is not answered on the {self._name} socket")
        return answer(wire.decode_request(head.kind, head.body))

    def _refuse(self, peer: Peer, head: wire.Head, error: RequestError) -> None:
        self._tally.errors[error.code] += 1
        self.delivery.post_error(peer, head.id, error, delimited=head.delimited)


def _no_streams(stream: Stream, error: MiroError) -> None:
    raise AssertionError("nothing is streamed here")
