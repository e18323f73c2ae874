"""--connect, for the commands that ask a worker."""

from __future__ import annotations

from typing import Any

import click

DEFAULT = "default"


def endpoint_of(connect: str) -> str:
    """The endpoint that --connect names. Raises UsageError when it cannot be one."""
    if connect == DEFAULT:
        from miro_client.endpoint import default_endpoint

        return default_endpoint()
    if "://" not in connect:
        raise click.UsageError(f"--connect takes an endpoint such as ipc:///tmp/miro.sock, not {connect!r}")
    return connect


def connect_option(command: Any) -> Any:
    """--connect of a command that is about a worker: the usual one unless told."""
    return click.option(
        "--connect",
        metavar="ENDPOINT",
        default=DEFAULT,
        show_default=True,
        help="The worker's; 'default' is where miro serve listens unless told.",
    )(command)
