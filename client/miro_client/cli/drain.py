"""`miro drain`: end a worker as SIGTERM does, from anywhere its admin socket can be reached."""

from __future__ import annotations

import click

from miro_client.checks import MAX_INT32
from miro_client.cli.connecting import connect_option, endpoint_of
from miro_client.cli.console import print_json, require_stdout


def load() -> click.Command:
    return drain


@click.command(
    epilog="""\b
    Examples:
      miro drain
      miro drain --connect ipc:///tmp/miro.sock --grace-ms 60000""",
)
@connect_option
@click.option(
    "--grace-ms", type=click.IntRange(0, MAX_INT32), metavar="N", help="Time to finish  [default: the worker's own]."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: live.")
def drain(connect: str, grace_ms: int | None, as_json: bool) -> None:
    """Make a worker take nothing new, finish what runs, and end.

    Returns at once; `miro status` shows when it is gone. What has not finished within the grace time ends with
    `restarted`.
    """
    endpoint = endpoint_of(connect)
    require_stdout()
    from miro_client import Client

    with Client(endpoint) as client:
        live = client.drain(grace_ms)
    if as_json:
        print_json({"live": live})
    else:
        click.echo(f"draining: {live} request{'s' * (live != 1)} may still finish")
