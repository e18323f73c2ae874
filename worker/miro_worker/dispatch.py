"""From a client's message to what it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from miro_client import wire
from miro_client.errors import DuplicateId, InternalError, RequestError, UnknownRequest, UnknownType, Unsupported
from miro_client.wire import Kind
from miro_worker.sessions import Sessions
from miro_worker.sockets import Inbound, Peer

log = logging.getLogger("miro.worker")

HANDLED = frozenset((Kind.HELLO, Kind.GENERATE, Kind.CREDIT, Kind.CANCEL, Kind.PING))
#: Where other requests belong, for those who knock at the wrong door.
ELSEWHERE = {Kind.STATS: "control", Kind.HEALTH: "control", Kind.MODELS: "control", Kind.DRAIN: "admin"}
#: These speak of a request; all others begin one.
ABOUT_LIVE = frozenset((Kind.CREDIT, Kind.CANCEL))


class Dispatcher:
    """Handles messages one by one; each gets its answer or its ERROR.

    welcome: the body of every WELCOME. pong(live request ids, echo): the body of a PONG.
    """

    def __init__(
        self, sessions: Sessions, *, welcome: wire.Welcome, pong: Callable[[list[bytes], Any], wire.Pong]
    ) -> None:
        self._sessions = sessions
        self._welcome = welcome
        self._pong = pong

    def handle(self, inbound: Inbound) -> None:
        peer = inbound.peer
        if peer.gone:
            return
        head = wire.split(inbound.frames)
        tally = self._sessions.tally
        tally.messages += 1
        tally.requests += head.kind == Kind.GENERATE
        try:
            if head.kind not in ABOUT_LIVE:
                self._sessions.admission.check_rate(peer)
            if head.error is not None:
                raise head.error
            self._dispatch(peer, head)
        except RequestError as error:
            self._refuse(peer, head, error)
        except Exception:
            log.exception("a message of type 0x%02x failed", head.kind)
            self._refuse(peer, head, InternalError("the message could not be handled"))

    def _dispatch(self, peer: Peer, head: wire.Head) -> None:
        if head.kind >= 0x80:
            raise UnknownType(f"{Kind(head.kind).name} is a worker's message")
        if head.kind in ELSEWHERE:
            raise Unsupported(f"{Kind(head.kind).name} is answered on the {ELSEWHERE[Kind(head.kind)]} socket")
        if head.kind not in HANDLED:
            raise Unsupported(f"{Kind(head.kind).name} is not supported by this worker")
        if head.kind not in ABOUT_LIVE and head.id in peer.streams:
            raise DuplicateId(f"request id {head.id.hex()} is live", field=head.id.hex())
        body = wire.decode_request(head.kind, head.body)
        if isinstance(body, wire.Generate):
            self._sessions.open(peer, head, body)
        elif isinstance(body, wire.Hello):
            self._sessions.reply(peer, head.id, self._welcome, delimited=head.delimited)
        elif isinstance(body, wire.Ping):
            pong = self._pong(list(peer.streams), body.echo)
            self._sessions.reply(peer, head.id, pong, delimited=head.delimited)
        elif isinstance(body, wire.Credit | wire.Cancel):
            self._about_live(peer, head, body)

    def _about_live(self, peer: Peer, head: wire.Head, body: wire.Credit | wire.Cancel) -> None:
        stream = peer.streams.get(head.id)
        if stream is None:
            # Finished is no error, the messages crossed. But a REQ socket needs an answer to everything.
            if head.delimited or head.id not in peer.finished:
                raise UnknownRequest(f"no request {head.id.hex()} on this connection")
        elif isinstance(body, wire.Credit):
            self._sessions.delivery.add_credit(stream, body.add)
        else:
            self._sessions.cancel(stream)

    def _refuse(self, peer: Peer, head: wire.Head, error: RequestError) -> None:
        # An ERROR that carried a live id would end that request for the client.
        tally = self._sessions.tally
        (tally.refused if head.kind == Kind.GENERATE else tally.errors)[error.code] += 1
        request_id = b"" if head.id in peer.streams else head.id
        if request_id and head.kind == Kind.GENERATE:
            peer.finish(request_id)  # its CANCEL may be under way, and gets no second answer
        self._sessions.reply_error(peer, request_id, error, delimited=head.delimited)
