"""What the user says in `miro chat`, a turn at a time: from a terminal or a pipe, over one line or several."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import click

from miro_client.cli.console import MAX_INPUT_BYTES, Failure, remark

QUOTES = '"""'
PROMPT, MORE = ">>> ", "... "
#: No two parts that may match the same characters follow each other: it takes linear time whatever is pasted.
_COMMAND = re.compile(r"/([a-z]+|\?)(?:[ \t](.*))?")


class Turn(NamedTuple):
    """A question, or the command of that name."""

    text: str
    command: str | None = None


def read_turn(line: Callable[[str], str]) -> Turn:
    """The next turn. line(prompt) gives a line without its break.

    Three quotes at the beginning of a line open a block, and three at the end of a line close it. A backslash at the
    end of a line goes on with the next one. Raises EOFError at the end, UnclosedBlock inside a block, TooLong.
    """
    line = _limited(line)
    first = line(PROMPT)
    if first.lstrip().startswith(QUOTES):
        return Turn(_block(first.lstrip()[len(QUOTES) :], line))
    return _command(first) or Turn(_continued(first, line))


class UnclosedBlock(Exception):
    """The input ended inside a block."""


class TooLong(Exception):
    """A turn of more than MAX_INPUT_BYTES."""


def _limited(line: Callable[[str], str]) -> Callable[[str], str]:
    """Lines that have, joined, at most MAX_INPUT_BYTES; TooLong instead of the one that goes beyond."""
    left = MAX_INPUT_BYTES + 1  # the last one needs no break

    def limited(prompt: str) -> str:
        nonlocal left
        text = line(prompt)
        left -= len(text.encode(errors="surrogatepass")) + 1
        if left < 0:
            raise TooLong
        return text

    return limited


def _command(line: str) -> Turn | None:
    if "\n" in line:  # pasted
        return None
    match = _COMMAND.fullmatch(line.rstrip(" \t"))
    return Turn((match[2] or "").strip(), match[1]) if match else None


def _block(first: str, line: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(line(MORE))
        except EOFError:
            raise UnclosedBlock from None
    return "\n".join(lines).rstrip()[: -len(QUOTES)].strip("\n")


def _continued(first: str, line: Callable[[str], str]) -> str:
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(line(MORE))
        except EOFError:
            break
    return "\n".join(lines)


class PipedInput:
    """Turns from a pipe or a file, in UTF-8."""

    def turn(self) -> Turn | None:
        """The next turn, None at the end. Raises Failure for input that cannot be a turn."""
        try:
            return read_turn(self._line)
        except EOFError:
            return None
        except UnclosedBlock:
            raise Failure(f"standard input ends inside a block of {QUOTES}") from None
        except TooLong:
            raise Failure(f"a question on standard input has more than {MAX_INPUT_BYTES} bytes") from None

    def _line(self, prompt: str) -> str:
        data = sys.stdin.buffer.readline(MAX_INPUT_BYTES + 1)
        if not data:
            raise EOFError
        if len(data) > MAX_INPUT_BYTES:
            raise TooLong
        try:
            return data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise Failure("standard input is not valid UTF-8") from None


class Interrupts:
    """Ctrl-C for who talks at a terminal: KeyboardInterrupt, but only inside `with interrupts:`.

    Elsewhere it waits for the next such block, so that it never leaves half a change behind.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._pending = False

    def install(self) -> Callable[[], Any]:
        """Take SIGINT over; call what this returns to give it back."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        return lambda: signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._allowed:
            self._pending = True
            return
        self._allowed = False
        raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._allowed = True
        if self._pending:
            self._pending = self._allowed = False
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        self._allowed = False


class TerminalInput:
    """Turns from a terminal, with line editing where Python has it. What is typed is kept in memory alone."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        try:
            import readline
        except ImportError:
            pass
        else:
            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one turn
        # Python's own streams, which tests may replace by what cannot be changed.
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")

    def turn(self) -> Turn | None:
        """The next turn, None when the user leaves. Ctrl-C drops what was typed."""
        while True:
            try:
                turn = read_turn(self._line)
                turn.text.encode()
                return turn
            except KeyboardInterrupt:
                click.echo(err=True)
                remark("[Ctrl-D or /exit leaves]")
            except UnicodeEncodeError:
                remark("[not valid UTF-8: dropped]")
            except TooLong:
                remark(f"[more than {MAX_INPUT_BYTES} bytes: dropped]")
            except (EOFError, UnclosedBlock):
                click.echo(err=True)
                return None

    def _line(self, prompt: str) -> str:
        with self._interrupts:
            if sys.stdout.isatty():
                return input(prompt)
            click.echo(prompt, nl=False, err=True)
            return input()
