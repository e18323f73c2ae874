"""The command `miro`, and `python -m miro_client`: a Ctrl-C while the interpreter still imports ends it quietly."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def leave(number: int, frame: FrameType | None) -> None:
    """A handler of SIGINT for as long as there is nothing to clean up."""
    os._exit(INTERRUPTED)


def main() -> None:
    # A shell that runs `miro &` may have it ignored; then it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from miro_client.cli import main as command

    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command(prog_name="miro")


if __name__ == "__main__":
    main()
