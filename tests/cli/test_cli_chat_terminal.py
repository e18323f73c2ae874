"""`miro chat` at a terminal, a real one: prompts, editing, Ctrl-C at the prompt and in an answer, Ctrl-D."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from terminal import CTRL_C, CTRL_D, HINT, MORE, PROMPT, Terminal, chat_code

pytestmark = pytest.mark.timeout(120)

#: An engine that repeats the question and says how many messages it saw; "endless" is answered without an end,
#: "slow" does not begin, and "lost" loses the worker.
ECHO = """
import sys, threading, time
from conftest import FakeEngine, FakeClient
import miro_client, miro_cy
from miro_client.errors import ConnectionLost
from miro_cy.requests import Event, Timing, Usage
class Echo(FakeEngine):
    def stream(self, prompt, params):
        messages = prompt["messages"]
        text = messages[-1]["content"]
        if text in ("slow", "endless"):
            print("[begun]", file=sys.stderr, flush=True)
        if text == "slow":
            threading.Event().wait(60)
        yield Event(1, text=f"{len(messages)}<{text}>", tokens=[1])
        while text == "endless":
            time.sleep(0.001)
            yield Event(1, text=" word", tokens=[2])
        if text == "lost":
            raise ConnectionLost("the worker closed the connection")
        yield Event(1, finish_reason="stop", usage=Usage(), timing=Timing())
vars(miro_cy)["Engine"] = Echo
class EchoClient(FakeClient):
    engine, endpoints = Echo, []
vars(miro_client)["Client"] = EchoClient
"""


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, code: str = ECHO, **environment: str) -> Terminal:
        opened.append(Terminal(chat_code(*arguments, before=code), **environment))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_conversation(terminal: Any) -> None:
    chat = terminal()
    assert "fake, 4,096 tokens of context. /help lists the commands" in chat.expect(PROMPT)
    assert chat.ask("one") == "1<one>"
    assert chat.ask("two") == "3<two>"
    assert chat.ask("/undo").startswith("[the last question")
    assert chat.ask("/retry") == "1<one>"
    assert "/retry" in chat.ask("/help")
    assert chat.ask("/nonsense").startswith("miro: error: unknown command /nonsense")
    assert chat.ask("three") == "3<three>"
    chat.type("/exit\r")
    assert chat.end() == 0


def test_several_lines(terminal: Any) -> None:
    chat = terminal()
    chat.expect(PROMPT)
    chat.type('"""\r')
    for line in ("one", 'two"""'):
        chat.expect(MORE)
        chat.type(f"{line}\r")
    assert "1<one\r\ntwo>" in chat.expect(PROMPT)
    chat.type("three\\\r")
    chat.expect(MORE)
    assert chat.ask("four") == "3<three\r\nfour>"
    chat.type('"""\r')
    chat.expect(MORE)
    chat.interrupt()
    chat.expect(HINT)
    chat.expect(PROMPT)
    assert chat.ask("five") == "5<five>"


def test_ctrl_c_at_the_prompt_drops_the_line_and_ctrl_d_leaves(terminal: Any) -> None:
    chat = terminal()
    chat.expect(PROMPT)
    for _ in range(2):
        chat.type("half a questi")
        chat.expect("half a questi")
        chat.interrupt()
        chat.expect(HINT)
        chat.expect(PROMPT)
    assert chat.ask("one") == "1<one>"
    chat.type(CTRL_D)
    assert chat.end() == 0
    assert "Traceback" not in chat.seen


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Any) -> None:
    chat = terminal()
    chat.expect(PROMPT)
    for messages in (1, 3):
        chat.type("endless\r")
        chat.expect(f"{messages}<endless> word")
        chat.type(CTRL_C)
        chat.expect("[stopped]")
        chat.expect(PROMPT)
    assert chat.ask("one") == "5<one>"  # what had come is remembered
    chat.type("slow\r")
    chat.expect("[begun]")
    chat.interrupt()
    chat.expect("[stopped before it began")
    chat.expect(PROMPT)
    assert chat.ask("two") == "7<two>"
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_a_lost_worker_does_not_end_the_chat(terminal: Any) -> None:
    chat = terminal("--connect", "ipc:///nowhere")
    chat.expect(PROMPT)
    assert chat.ask("one") == "1<one>"
    assert chat.ask("lost").endswith("miro: error: the worker closed the connection")
    assert chat.ask("two") == "3<two>"
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_the_line_can_be_edited_and_recalled(terminal: Any) -> None:
    pytest.importorskip("readline")
    chat = terminal(TERM="xterm")
    chat.expect(PROMPT)
    chat.type("onX\x7fe\r")
    chat.expect("1<one>")
    chat.expect(PROMPT)
    chat.type("\x1b[A\r")  # up: the last line again
    chat.expect("3<one>")
    chat.expect(PROMPT)
    chat.type("\x1b[200~two\nlines\x1b[201~\r")  # pasted: one question
    chat.expect("5<two")
    chat.expect("lines>")


def test_json_at_a_terminal(terminal: Any) -> None:
    chat = terminal("--json")
    chat.expect(PROMPT)
    assert json.loads(chat.ask("one"))["text"] == "1<one>"
    chat.type("endless\r")
    chat.expect("[begun]")
    chat.type(CTRL_C)
    stopped = json.loads(chat.expect("[stopped").strip().removeprefix("^C"))
    assert stopped["finish_reason"] == "cancelled"


def test_the_answer_cannot_steer_the_terminal(terminal: Any) -> None:
    chat = terminal()
    chat.expect(PROMPT)
    chat.type('"""\x16\x1b]0;x\x16\x07"""\r')  # Ctrl-V: the next key as it is
    assert "1<\ufffd]0;x\ufffd>" in chat.expect(PROMPT)


def test_loading_shows_progress(terminal: Any) -> None:
    loading = """
class Loading(Echo):
    @classmethod
    def load(cls, name, *, progress, **overrides):
        progress(1, 3)
        progress(3, 3)
        return cls()
vars(miro_cy)["Engine"] = Loading
"""
    chat = terminal("--model", "tiny", code=ECHO + loading)
    chat.expect("loading tiny: 33 %")
    chat.expect("loading tiny: 100 %\r\x1b[K")
    assert chat.expect(PROMPT).startswith("fake, ")
