"""What the commands write, and to whom: text to stdout, remarks and progress to stderr, progress to a terminal only."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import IO, Any

import click

# A model's text, and a worker's error message, are data: on a terminal they must not move the cursor or set its title.
_CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if c not in (9, 10)], "\ufffd")
# What stands for the bytes of a name that is not UTF-8: not every stream takes them, and they may be controls too.
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_BREAKS = {9: " ", 10: " ", 13: " "}


#: Most bytes of one prompt on standard input.
MAX_INPUT_BYTES = 16 << 20


class Failure(click.ClickException):
    """A command failed: one line on stderr, exit status 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        file = file or sys.stderr
        if file is not None:
            click.echo(f"miro: error: {one_line(self.message)}", file=file)


def one_line(text: str) -> str:
    """The text without line breaks, control characters and what is not Unicode."""
    return text.strip().translate(_SURROGATES | _CONTROLS | _BREAKS)


def size_text(n: int) -> str:
    """Bytes for a person to read."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} bytes"


class TextOut:
    """Streams generated text to stdout and ends it with a line break."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._at_line_start = True
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal that cannot show a character shows "?"; it does not end the answer.
            sys.stdout.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        # Not click.echo, which takes escape sequences out of what goes to a file: there the text stays as it is.
        if text:
            sys.stdout.write(text.translate(_CONTROLS) if self._terminal else text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def end(self) -> None:
        if not self._at_line_start:
            self.write("\n")


def remark(text: str) -> None:
    """A line for a person at a terminal; nothing when stderr is not one."""
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(one_line(text), err=True)


def remark_cut(n_tokens: int) -> None:
    remark(f"[cut after {n_tokens} tokens; --max-tokens sets how many]")


def print_json(value: dict[str, Any]) -> None:
    """One line on stdout, in UTF-8 whatever the locale; what is not Unicode, as in a file's name, becomes "?"."""
    click.echo(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


class Progress:
    """A line on stderr that redraws itself, on a terminal only; `progress(done, total, what)` in bytes."""

    def __init__(self, subject: str) -> None:
        self._subject = one_line(subject)
        self._shown = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        self.show(f"{what} {self._subject}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def loading(self, done: int, total: int) -> None:
        """Tensors of a model."""
        self.show(f"loading {self._subject}: {100 * done // max(1, total)} %")

    def show(self, line: str) -> None:
        """That line in place of the one before."""
        if line != self._shown and sys.stderr is not None and sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)
            self._shown = line

    def end(self) -> None:
        """Leave the line where it is."""
        if self._shown:
            click.echo(err=True)
            self._shown = ""

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._shown = ""


def require_stdout() -> None:
    """Raise Failure when standard output was closed before the process began: an answer would go nowhere."""
    if sys.stdout is None:
        raise Failure("standard output is closed")


def flush_stdout() -> None:
    """What cannot be written even now is thrown away: at interpreter exit it would fail again, with a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        silence_stdout()


def silence_stdout() -> None:
    """After the reader has gone: what is still buffered goes nowhere, also at interpreter exit."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
