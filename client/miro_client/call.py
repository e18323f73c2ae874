"""One request on its way, and where the replies to it wait until its caller takes them."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from typing import Any

import msgspec

from miro_client import wire
from miro_client.errors import BadField, MiroError, RequestTimeout, TooLarge

#: Most bytes of one answer that may wait for a caller who does not take them.
MAX_WAITING_BYTES = 16 * 2**20
#: What a reply takes in memory besides the bytes of its frames, about.
OVERHEAD_BYTES = 512

#: A reply and its size; None only wakes who waits.
Entry = tuple[wire.Reply | MiroError | None, int]


class Inbox:
    """The connection's thread puts, one caller at a time takes."""

    def __init__(self) -> None:
        # Each is written on one side alone, so that neither needs a lock.
        self._put_bytes = 0
        self._taken_bytes = 0

    @property
    def full(self) -> bool:
        return self._put_bytes - self._taken_bytes > MAX_WAITING_BYTES

    def put(self, reply: wire.Reply | MiroError, size: int = 0) -> None:
        """Called by the connection's thread alone. size: bytes of the frames."""
        self._put_bytes += size + OVERHEAD_BYTES
        self._push((reply, size + OVERHEAD_BYTES))

    def wake(self) -> None:
        """Whoever waits gets None. Any thread; takes no lock: the garbage collector may call it."""
        self._push((None, 0))

    def _push(self, entry: Entry) -> None:
        raise NotImplementedError

    def _unpack(self, entry: Entry) -> wire.Reply | None:
        reply, size = entry
        self._taken_bytes += size
        if isinstance(reply, MiroError):
            raise reply
        return reply


class ThreadInbox(Inbox):
    """For a caller that blocks its thread while it waits."""

    def __init__(self) -> None:
        super().__init__()
        # Its put is re-entrant, as `wake` promises.
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()

    def _push(self, entry: Entry) -> None:
        self._entries.put(entry)

    def take(self, timeout: float | None) -> wire.Reply | None:
        """The next reply. Raises RequestTimeout, or what the connection says."""
        try:
            entry = self._entries.get(timeout=timeout)
        except queue.Empty:
            raise RequestTimeout(f"no answer within {timeout:g} s") from None
        return self._unpack(entry)


class Call:
    """One request on its way: the thread puts its replies into the inbox, the caller takes them.

    Raises BadField for a body that cannot be encoded, TooLarge for one that no worker takes.
    """

    def __init__(self, body: wire.Request, inbox: Inbox) -> None:
        self.id = os.urandom(wire.MIN_ID_BYTES)
        self.frames = _encode(self.id, body)
        self.generates = isinstance(body, wire.Generate)
        self.inbox = inbox
        # Owned by the thread.
        self.sent = False
        self.cancelled = False
        self.probed = False
        self.connect_by = 0.0


def _encode(request_id: bytes, body: wire.Request) -> list[bytes]:
    try:
        frames = wire.encode(request_id, body)
    except Exception as error:  # no type of msgpack's, or whatever an object of somebody else's raises
        raise _refusal(body, error) from error
    limit, size = wire.MAX_MESSAGE_BYTES, len(frames[-1])
    if size > limit:
        # ZeroMQ would answer by closing the connection.
        raise TooLarge(f"a request takes at most {limit} bytes, this one has {size}", field="prompt")
    return frames


def _refusal(body: wire.Request, error: Exception) -> BadField:
    """What says that a body cannot be encoded, and which of its parts it is."""
    text = f"the request cannot be encoded: {error!s:.200}"
    if isinstance(error, UnicodeEncodeError):
        text = f"the text is not valid Unicode: {error.reason}"
    elif isinstance(error, RecursionError):
        text = "the request is nested too deeply to be sent"
    for name, part in _parts(body):
        try:
            msgspec.msgpack.encode(part)
        except Exception:
            return BadField(text, field=name[:80])
    return BadField(text)


def _parts(body: wire.Request) -> Iterator[tuple[str, Any]]:
    """What callers fill in, named as a worker names it."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name == "messages":
            for i, message in enumerate(value or ()):
                for key in message.__struct_fields__:
                    yield f"messages[{i}].{key}", getattr(message, key)
        elif name == "sampling":
            yield from value.items()
        elif value is not msgspec.UNSET:
            yield name, value
