"""What Client and AsyncClient share: the connection, how requests are built, how single replies are read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from miro_client import __version__, wire
from miro_client.answer import error_of
from miro_client.checks import MAX_INT32, check_int, check_items, shown
from miro_client.connection import Connection
from miro_client.endpoint import admin_endpoint, check_endpoint, check_private, control_endpoint, default_endpoint
from miro_client.errors import BadField, ConnectionLost

#: A reply to a question that has one.
Body = TypeVar("Body", bound=msgspec.Struct)
#: How long a question about the worker waits unless told otherwise, in seconds: longer than connecting takes to fail,
#: which says better what is wrong.
CONTROL_S = 8.0
#: Keywords of a call that are keys of GENERATE itself, not of `sampling`.
OWN = frozenset(("priority", "queue_ms", "deadline_ms"))
#: Most token ids of a prompt: what a message holds.
MAX_IDS = wire.MAX_MESSAGE_BYTES // 4
HELLO = wire.Hello(minor=wire.MINOR, client=f"miro-client {__version__}", lang="python")


class ClientBase:
    """A connection to a worker, closed when its owner is."""

    def __init__(self, endpoint: str | None = None, *, timeout: float | None = None) -> None:
        """Connects in the background. Raises ConfigError for an endpoint ZeroMQ cannot use, BadField for a timeout."""
        if endpoint is None:
            endpoint = default_endpoint()
            folder = Path(endpoint.removeprefix("ipc://")).parent
            if os.path.lexists(folder):
                check_private(folder)
        check_endpoint(endpoint)
        self.timeout = check_timeout(timeout)
        self.endpoint = endpoint
        self._connection = Connection(endpoint)
        self._opening = threading.Lock()
        self._connections = {endpoint: self._connection}
        # At exit too: the threads must not be inside ZeroMQ when the interpreter goes.
        self._finalizer = weakref.finalize(self, _close, self._connections)

    def _connection_for(self, body: wire.Request) -> Connection:
        """The one over which the worker takes such a question; made when it is first needed. Raises ConnectionLost."""
        if isinstance(body, wire.Drain):
            endpoint = admin_endpoint(self.endpoint)
        elif isinstance(body, wire.Stats | wire.Health | wire.Models):
            endpoint = control_endpoint(self.endpoint)
        else:
            return self._connection
        self._connection.check_process()
        with self._opening:
            if not self._finalizer.alive:
                raise ConnectionLost("the client is closed")
            if endpoint not in self._connections:
                self._connections[endpoint] = Connection(endpoint)
            return self._connections[endpoint]

    def _wait_s(self, timeout: float | None) -> float | None:
        """A call's own timeout, checked, or the client's."""
        return check_timeout(self.timeout if timeout is None else timeout)


def _close(connections: dict[str, Connection]) -> None:
    for connection in list(connections.values()):
        connection.close()


def check_timeout(timeout: float | None) -> float | None:
    """The timeout as a float, or None. Raises BadField unless it is a number of seconds that can be waited for."""
    if timeout is None:
        return None
    # A number of another kind, such as a Fraction, is a number too; but not what waits take.
    if not isinstance(timeout, Real) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        limit = int(threading.TIMEOUT_MAX)
        raise BadField(f"timeout must be 0 to {limit} seconds or None, not {shown(timeout)}", field="timeout")
    return float(timeout)


def generate_body(
    prompt: str | None,
    tokens: Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    sampling: Mapping[str, Any],
    *,
    stream: bool,
) -> wire.Generate:
    """The body of a GENERATE. Raises BadField for what it cannot hold.

    sampling: may hold priority, queue_ms and deadline_ms too, which are the request's own.
    """
    if sum(given is not None for given in (prompt, tokens, messages)) != 1:
        raise BadField("give exactly one of prompt, tokens and messages", field="prompt")
    return wire.Generate(
        prompt=prompt,
        tokens=None if tokens is None else wire.pack_ids(check_items("tokens", tokens, MAX_IDS, error=BadField)),
        messages=None if messages is None else _messages(messages),
        sampling=_sampling({name: value for name, value in sampling.items() if name not in OWN}),
        stream=stream,
        **_sampling({name: value for name, value in sampling.items() if name in OWN}),
    )


def _messages(messages: object) -> list[wire.ChatMessage]:
    made = []
    for i, message in enumerate(check_items("messages", messages, wire.MAX_MESSAGES, what="maps", error=BadField)):
        if not isinstance(message, Mapping):
            text = f"a message is a map with role and content, not {shown(message)}"
            raise BadField(text, field=f"messages[{i}]")
        try:
            made.append(wire.ChatMessage(**message))
        except Exception as error:  # a missing or unknown key, or whatever a map of somebody else's raises
            raise BadField(f"messages[{i}] cannot be sent: {error!s:.200}", field=f"messages[{i}]") from error
    return made


def drain_body(grace_ms: int | None) -> wire.Drain:
    """The body of a DRAIN. Raises BadField for a grace time that no worker takes."""
    if grace_ms is not None:
        check_int("grace_ms", grace_ms, 0, MAX_INT32, error=BadField)
    return wire.Drain(grace_ms=grace_ms)


def expect(reply: wire.Reply | None, kind: type[Body]) -> Body:
    """The reply, if it is of that kind. Raises what an ERROR says, ConnectionLost for anything else."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, wire.Result):
        return reply.read(kind)
    if isinstance(reply, wire.Error):
        raise error_of(reply)
    raise ConnectionLost(f"the worker answered with {type(reply).__name__}")


def _sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in sampling.items():
        try:
            plain[name] = _plain(value)
        except RecursionError:
            raise BadField(f"{name:.80} is nested too deeply to be sent", field=name[:80]) from None
        except Exception as error:  # whatever an object of somebody else's raises
            raise BadField(f"{name:.80} cannot be sent: it is {shown(value)}", field=name[:80]) from error
    return plain


def _plain(value: Any) -> Any:
    """Values as the wire takes them: tuples become lists, what NumPy made becomes Python's own."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
