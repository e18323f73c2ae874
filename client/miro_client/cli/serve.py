"""`miro serve`: the worker in this process, with the options of `miro-worker`."""

from __future__ import annotations

import click

from miro_client.cli.console import Failure


def load() -> click.Command:
    try:
        from miro_worker.__main__ import main as worker
    except ModuleNotFoundError as error:
        if error.name not in ("miro_worker", "miro_cy"):
            raise
        raise Failure("miro serve needs the engine: pip install miro-cy") from error
    return click.Command(
        "serve",
        callback=worker.callback,
        params=worker.params,
        help=(worker.help or "").replace("miro-worker", "miro serve"),
    )
