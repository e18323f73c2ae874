"""What a conversation may hold before a chat template sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from miro_client.checks import shown
from miro_cy.errors import BadField

MAX_MESSAGES = 10_000
MAX_ROLE_CHARS = 64
#: How deep the values of a message may nest, and how many there may be in a conversation.
MAX_DEPTH = 16
MAX_VALUES = 100_000
_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
)
_REASONING = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the messages, as a template may have them. Raises BadField whose field is the place: messages[2].name.

    Each has a role (1 to 64 characters) and a content: a text or a list of {"type": "text", "text": ...}; an assistant
    that calls tools may do without. It may also hold name, tool_call_id, reasoning_content (also called reasoning or
    thinking): texts, and tool_calls: a list of JSON objects. What is None counts as absent, as in transformers.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        _refuse("messages", f"must be a list, not {shown(messages)}")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        _refuse("messages", f"must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    checker = _Checker()
    return [_check_message(checker, f"messages[{i}]", message) for i, message in enumerate(messages)]


def _refuse(place: str, problem: str) -> NoReturn:
    raise BadField(f"{place} {problem}", field=place)


def _check_message(checker: _Checker, where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(where, f"must be a map, not {shown(message)}")
    given = {key: value for key, value in message.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            name = key[:80] if isinstance(key, str) else shown(key)
            raise BadField(f"{where} cannot hold {shown(key)}", field=f"{where}.{name}")
    for key in ("role",) if "tool_calls" in given else ("role", "content"):
        if key not in given:
            keys = ", ".join(sorted(map(repr, given)))
            reason = f"{where} must have role and content, not {keys or 'nothing':.80}"
            raise BadField(reason, field=f"{where}.{key}")
    checked: dict[str, Any] = {}
    for key, value in given.items():
        place = f"{where}.{key}"
        if key == "tool_calls" or (key == "content" and not isinstance(value, str)):
            checked[key] = _check_list(checker, place, value)
        elif not isinstance(value, str):
            _refuse(place, f"must be a string, not {shown(value)}")
        else:
            checked[key] = checker.text(place, value)
    if not 1 <= len(checked["role"]) <= MAX_ROLE_CHARS:
        _refuse(f"{where}.role", f"must have 1 to {MAX_ROLE_CHARS} characters, not {len(checked['role'])}")
    reasoning = next((checked[key] for key in _REASONING if key in checked), None)
    # Templates know it by two names; so does transformers, in this order.
    return checked if reasoning is None else {"thinking": reasoning, **checked, "reasoning_content": reasoning}


def _check_list(checker: _Checker, where: str, value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        kind = "a string or a list of maps" if where.endswith("content") else "a list of maps"
        _refuse(where, f"must be {kind}, not {shown(value)}")
    items = [checker.plain(f"{where}[{i}]", item, 0) for i, item in enumerate(value)]
    if where.endswith("content"):
        for i, item in enumerate(items):
            if set(item) != {"type", "text"} or item["type"] != "text" or not isinstance(item["text"], str):
                _refuse(f"{where}[{i}]", f'must be {{"type": "text", "text": ...}}, not {shown(item)}')
    return items


class _Checker:
    """Copies values as plain JSON types, counting them over a conversation."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def text(self, where: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(where, "is not valid Unicode")
        return str.__str__(value)

    def plain(self, where: str, value: object, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise BadField(f"messages hold more than {MAX_VALUES} values", field=where)
        if depth > MAX_DEPTH:
            _refuse(where, f"nests deeper than {MAX_DEPTH}")
        if isinstance(value, str):
            return self.text(where, value)
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                _refuse(where, "must have strings as keys")
            return {self.text(where, key): self.plain(where, item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(where, item, depth + 1) for item in value]
        _refuse(where, f"must be plain JSON, not {shown(value)}")
