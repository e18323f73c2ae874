"""What a conversation may hold besides roles and texts."""

from __future__ import annotations

from typing import Any

import pytest

from miro_cy.errors import BadField
from miro_cy.text import messages as limits
from miro_cy.text.messages import MAX_DEPTH, MAX_MESSAGES, check_messages

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [True, None, 1.5, "x"]}}}


def test_what_templates_need_is_passed_on() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "2+3?"}], "name": "Ann"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": (CALL,)},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    checked = check_messages(conversation)
    assert checked[:2] == conversation[:2]
    assert checked[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert checked[3] == conversation[3]
    checked[1]["tool_calls"][0]["function"]["name"] = "changed"
    assert CALL["function"]["name"] == "add"  # type: ignore[index]


def test_none_is_absent_as_in_transformers() -> None:
    assert check_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == [
        {"role": "assistant", "tool_calls": [CALL]}
    ]
    assert check_messages([{"role": "user", "content": "x", "name": None}]) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_the_names_that_templates_read(key: str) -> None:
    (checked,) = check_messages([{"role": "assistant", "content": "x", key: "because"}])
    assert checked["thinking"] == checked["reasoning_content"] == "because"


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


WRONG: list[tuple[Any, str]] = [
    ({"role": "user"}, r"messages\[0\] must have role and content, not 'role'"),
    ({"role": "user", "content": None}, "must have role and content"),
    ({"content": "x", "tool_calls": []}, "must have role and content"),
    ({}, "not nothing"),
    ({"role": "user", "content": "x", "extra": 1}, "cannot hold 'extra'"),
    ({"role": "user", "content": "x", 5: 1}, "cannot hold 5"),
    ({"role": "user", "content": 1}, r"messages\[0\]\.content must be a string or a list of maps"),
    ({"role": "user", "content": ["x"]}, "content must be a string or a list of maps"),
    ({"role": "user", "content": [{"type": "image"}]}, r'content\[0\] must be \{"type": "text"'),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, r'content\[0\] must be \{"type": "text"'),
    ({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, r"content\[0\] is not valid Unicode"),
    ({"role": 1, "content": "x"}, "role must be a string"),
    ({"role": "user", "content": "x", "name": 1}, "name must be a string"),
    ({"role": "user", "tool_calls": "x"}, "tool_calls must be a list of maps"),
    ({"role": "user", "tool_calls": [1]}, "tool_calls must be a list of maps"),
    ({"role": "user", "tool_calls": [{"a": object()}]}, r"tool_calls\[0\] must be plain JSON"),
    ({"role": "user", "tool_calls": [{1: 2}]}, "must have strings as keys"),
    ({"role": "user", "tool_calls": [nested(MAX_DEPTH + 1)]}, f"deeper than {MAX_DEPTH}"),
    ("x", "must be a map"),
]


@pytest.mark.parametrize(("message", "match"), WRONG)
def test_errors_say_which_message_is_wrong(message: Any, match: str) -> None:
    with pytest.raises(BadField, match=match) as caught:
        check_messages([message])
    assert str(caught.value.field).startswith("messages[0]")
    assert str(caught.value).startswith(str(caught.value.field)[:11])


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ([], [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)):
        with pytest.raises(BadField, match=f"1 to {MAX_MESSAGES} messages"):
            check_messages(wrong)
    monkeypatch.setattr(limits, "MAX_VALUES", 10)
    with pytest.raises(BadField, match="more than 10 values"):
        check_messages([{"role": "user", "tool_calls": [{"a": [1] * 10}]}])
