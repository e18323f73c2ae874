"""What a conversation may hold before a chat template sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miro_cy.errors import BadField

MAX_MESSAGES = 10_000
#: How deep the values of a message may nest, and how many there may be in a conversation.
MAX_DEPTH = 16
MAX_VALUES = 1_000_000
_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
)
_REASONING = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the messages, as a template may have them. Raises BadField saying which is wrong, and how.

    Each has a role and a content: a text or a list of {"type": "text", "text": ...}; an assistant that calls tools may
    do without. It may also hold name, tool_call_id, reasoning_content (also called reasoning or thinking): texts, and
    tool_calls: a list of JSON objects. What is None counts as absent, as in transformers.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise BadField(f"messages must be a list, not {messages!r:.80}", field="messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadField(f"messages must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}", field="messages")
    checker = _Checker()
    return [_check_message(checker, f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(checker: _Checker, where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadField(f"{where} must be a map, not {message!r:.80}", field="messages")
    given = {key: value for key, value in message.items() if value is not None}
    required = {"role"} if "tool_calls" in given else {"role", "content"}
    if not required <= set(given) or not set(given) <= _KEYS:
        keys = ", ".join(sorted(map(repr, given)))
        wrong = ", ".join(sorted(map(repr, set(given) - _KEYS)))
        reason = f"cannot hold {wrong:.80}" if wrong else f"must have role and content, not {keys or 'nothing':.80}"
        raise BadField(f"{where} {reason}", field="messages")
    checked: dict[str, Any] = {}
    for key, value in given.items():
        place = f"{where}.{key}"
        if key == "tool_calls" or (key == "content" and not isinstance(value, str)):
            checked[key] = _check_list(checker, place, value)
        elif not isinstance(value, str):
            raise BadField(f"{place} must be a string, not {value!r:.80}", field="messages")
        else:
            checked[key] = checker.text(place, value)
    reasoning = next((checked[key] for key in _REASONING if key in checked), None)
    # Templates know it by two names; so does transformers, in this order.
    return checked if reasoning is None else {"thinking": reasoning, **checked, "reasoning_content": reasoning}


def _check_list(checker: _Checker, where: str, value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        kind = "a string or a list of maps" if where.endswith("content") else "a list of maps"
        raise BadField(f"{where} must be {kind}, not {value!r:.80}", field="messages")
    items = [checker.plain(f"{where}[{i}]", item, 0) for i, item in enumerate(value)]
    if where.endswith("content"):
        for i, item in enumerate(items):
            if set(item) != {"type", "text"} or item["type"] != "text" or not isinstance(item["text"], str):
                raise BadField(
                    f'{where}[{i}] must be {{"type": "text", "text": ...}}, not {item!r:.80}', field="messages"
                )
    return items


class _Checker:
    """Copies values as plain JSON types, counting them over a conversation."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def text(self, where: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadField(f"{where} is not valid Unicode", field="messages") from None
        return str.__str__(value)

    def plain(self, where: str, value: object, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise BadField(f"messages hold more than {MAX_VALUES} values", field="messages")
        if depth > MAX_DEPTH:
            raise BadField(f"{where} nests deeper than {MAX_DEPTH}", field="messages")
        if isinstance(value, str):
            return self.text(where, value)
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise BadField(f"{where} must have strings as keys", field="messages")
            return {self.text(where, key): self.plain(where, item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(where, item, depth + 1) for item in value]
        raise BadField(f"{where} must be plain JSON, not {value!r:.80}", field="messages")
