"""Turns of any size: what is pasted or piped is read in linear time, up to a limit."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from miro_client.cli import turns
from miro_client.cli.console import Failure
from miro_client.cli.turns import Interrupts, PipedInput, TerminalInput, TooLong, Turn, read_turn

#: What would take longer than this is not linear.
pytestmark = pytest.mark.timeout(60)


def reader(lines: Iterable[str]) -> Callable[[str], str]:
    left = iter(lines)

    def line(prompt: str) -> str:
        text = next(left, None)
        if text is None:
            raise EOFError
        return text

    return line


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        ("/clear", Turn("", "clear")),
        ("/clear \t ", Turn("", "clear")),
        ("/system  Be kind. ", Turn("Be kind.", "system")),
        ("/system\tBe  kind.", Turn("Be  kind.", "system")),
        ("/?", Turn("", "?")),
        ("/?x", Turn("/?x")),
        ("/Clear", Turn("/Clear")),
        ("/clear\nthat", Turn("/clear\nthat")),
        ("/system x\n", Turn("/system x\n")),
        ("/", Turn("/")),
    ],
)
def test_commands(line: str, turn: Turn) -> None:
    assert read_turn(reader([line])) == turn


@pytest.mark.parametrize("line", ["/a" + " " * 10**6 + "\nx", "/a" + " \t" * 10**6 + "x\n", "/" + "a" * 10**6 + "!"])
def test_a_line_is_read_in_linear_time(line: str) -> None:
    assert read_turn(reader([line])) == Turn(line)


def test_a_command_is_read_in_linear_time() -> None:
    assert read_turn(reader(["/a" + " " * 10**6 + "x" + " " * 10**6])) == Turn("x", "a")


def test_many_lines_are_read_in_linear_time() -> None:
    n = 10**6
    assert len(read_turn(reader(itertools.chain(['"""'], itertools.repeat("x", n), ['"""']))).text) == 2 * n - 1
    assert len(read_turn(reader(itertools.chain(itertools.repeat("x\\", n), ["x"]))).text) == 2 * n + 1


@pytest.mark.parametrize("first", ['"""', "\\", "é\\"])
def test_lines_without_an_end_are_read_up_to_the_limit(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_INPUT_BYTES", 1000)
    taken = itertools.count()
    with pytest.raises(TooLong):
        read_turn(reader(itertools.chain([first], (f"é{next(taken) % 10}\\" for _ in itertools.repeat(None)))))
    assert next(taken) <= 200  # of five bytes each


def test_a_turn_of_just_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_INPUT_BYTES", 9)
    assert read_turn(reader(["abcd\\", "efg"])) == Turn("abcd\nefg")
    assert read_turn(reader(["abcdefghi"])) == Turn("abcdefghi")
    for lines in (["abcd\\", "efgh"], ["abcdefghij"]):
        with pytest.raises(TooLong):
            read_turn(reader(lines))


@pytest.mark.parametrize("data", ['"""\n' + "ab\n" * 50, "ab\\\n" * 50, "a" * 101, "a" * 100 + "\n"])
def test_a_piped_question_that_is_too_long_is_a_failure(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_INPUT_BYTES", 100)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data.encode())))
    with pytest.raises(Failure) as caught:
        PipedInput().turn()
    assert caught.value.message == "a question on standard input has more than 100 bytes"


def test_a_typed_question_that_is_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    remarks: list[str] = []
    monkeypatch.setattr(turns, "MAX_INPUT_BYTES", 100)
    monkeypatch.setattr(turns, "remark", remarks.append)
    line = reader(["a" * 101, '"""', "b" * 60, "c" * 60, "next"])
    monkeypatch.setattr("builtins.input", lambda *_: line(""))
    terminal = TerminalInput(Interrupts())
    assert terminal.turn() == Turn("next")
    assert remarks == ["[more than 100 bytes: dropped]"] * 2
