"""Messages off the wire, as the engine takes them. What nests is read here, within limits, on the text thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from miro_client import wire
from miro_client.errors import BadField
from miro_cy.text.messages import MAX_DEPTH, MAX_VALUES

_List = Annotated[list[Raw], Meta(max_length=MAX_VALUES)]
_Map = Annotated[dict[str, Raw], Meta(max_length=MAX_VALUES)]
#: One level of a value: what it holds stays encoded until it is counted.
_LEVEL: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(None | bool | int | float | str | _List | _Map)
_ENCODER = msgspec.msgpack.Encoder()


def size_of(messages: Sequence[wire.ChatMessage]) -> int:
    """Bytes that the messages take while they wait."""
    return len(_ENCODER.encode(messages))


def unpack_messages(messages: Sequence[wire.ChatMessage]) -> list[dict[str, Any]]:
    """The messages as maps, for `Engine.prepare`, which checks the rest.

    Raises BadField naming messages[i].content or .tool_calls when they are no msgpack, nest deeper than MAX_DEPTH, or
    hold more than MAX_VALUES values in the whole conversation: before memory is taken for them.
    """
    reader = _Reader()
    return [reader.read(f"messages[{i}]", message) for i, message in enumerate(messages)]


class _Reader:
    """Counts values over a conversation: a few megabytes can encode millions, each an object in memory."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def read(self, where: str, message: wire.ChatMessage) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, Raw):
                if memoryview(value).nbytes:
                    given[name] = self._read(f"{where}.{name}", value)
            elif value is not None:
                given[name] = value
        return given

    def _read(self, where: str, raw: Raw) -> Any:
        try:
            return self._value(where, raw, -1)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadField(f"{where} must be plain JSON: {error!s:.200}", field=where) from None

    def _value(self, where: str, raw: Raw, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BadField(f"{where} nests deeper than {MAX_DEPTH}", field=where)
        value = _LEVEL.decode(raw)
        if isinstance(value, (list, dict)):
            self._left -= len(value)
            if self._left < 0:
                raise BadField(f"messages hold more than {MAX_VALUES} values", field=where)
        if isinstance(value, list):
            return [self._value(where, item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {key: self._value(where, item, depth + 1) for key, item in value.items()}
        return value
