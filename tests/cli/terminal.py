"""A program at a terminal of its own, and waits that have a deadline."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

DEADLINE_S = 30.0
SOURCES = [str(Path(__file__).parents[2] / part) for part in ("", "worker", "client")]
CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT, MORE = ">>> ", "... "
HINT = "[Ctrl-D or /exit leaves]"
CHAT = """
from miro_client.cli import main
main(["chat", *ARGUMENTS])
"""


def chat_code(*arguments: str, before: str = "") -> str:
    """A program that is `miro chat` with these arguments, after what else it does."""
    return before + CHAT.replace("ARGUMENTS", repr(arguments))


class Terminal:
    """A program whose three streams are a terminal of its own; every wait has a deadline."""

    def __init__(self, code: str, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        head = (
            "import fcntl, sys, termios\n"
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C typed there is a signal here
            f"sys.path[:0] = {[str(Path(__file__).parent), *SOURCES]!r}\n"
        )
        variables = os.environ | {"TERM": "dumb", "PYTHONIOENCODING": "utf-8", "INPUTRC": "/dev/null"} | environment
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + code], start_new_session=True, env=variables, **streams
        )
        os.close(theirs)
        self.seen = ""
        self._bytes = b""

    def type(self, text: str | bytes) -> None:
        os.write(self.ours, text.encode() if isinstance(text, str) else text)

    def expect(self, text: str) -> str:
        """Wait for the text; what came before it, since the last wait."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come: {self.seen!r}"
            assert self._read(left), f"no {text!r} before the program's end or the deadline: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self) -> None:
        """Type Ctrl-C once the program waits: in between, Python's line editing may miss it until the next key."""
        deadline, asleep = time.monotonic() + DEADLINE_S, 0
        while asleep < 3:
            assert time.monotonic() < deadline, "the program does not come to rest"
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.01)
        self.type(CTRL_C)

    def ask(self, text: str) -> str:
        """Type a line at the prompt; what is shown up to the next prompt, less the echo."""
        self.type(f"{text}\r")
        return self.expect(PROMPT).partition("\r\n")[2].strip()

    def end(self) -> int:
        """Wait for the end; the exit status."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(max(0.0, deadline - time.monotonic())):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, timeout: float) -> bool:
        if not select.select([self.ours], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self.ours, 1 << 16)
        except OSError:  # nobody has the terminal open any more
            return False
        # Without what the line editor says to the terminal itself.
        self.seen += re.sub(r"\x1b\[\?[0-9]+[hl]\r?", "", data.decode())
        return bool(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self.ours)
