"""The miro worker: one model behind a ZeroMQ socket.

Three threads, joined by bounded queues, so that none waits for another's work:

    clients <-> io_loop (sockets, codec, limits) -> text_loop (template, tokens) -> step_loop (the engine)
                   ^------------------- outcomes: admitted, refused, stepped -----------------'

`sockets` knows connections, `dispatch` messages, `sessions` how requests begin and end, `streams` their unsent output,
`delivery` flow control; `worker` starts and stops it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miro_worker.config import WorkerConfig
    from miro_worker.worker import Worker

__all__ = ["Worker", "WorkerConfig"]


def __getattr__(name: str) -> Any:
    # Lazily, so that `miro-worker --help` does not load ZeroMQ.
    from importlib import import_module

    homes = {"Worker": "miro_worker.worker", "WorkerConfig": "miro_worker.config"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
