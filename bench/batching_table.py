"""What paging, continuous batching and chunked prefill each add: the same requests served four ways by one engine.

One at a time is this engine's own best single stream, with a contiguous KV cache reckoned beside it. A static batch is
admitted together and joined by nobody. Continuous batching takes requests in as they come, each prompt whole in one
step; chunked prefill cuts prompts so that a step keeps to step_ms.
"""

from __future__ import annotations

import json

import click

from batching.engine import Task, open_model
from batching.report import lines_of, measure, result_of
from miro_client.cli.console import Failure, Progress
from miro_cy.errors import MiroError
from miro_cy.hub import resolve
from miro_cy.machine import default_threads
from peers.result import save


@click.command(help=__doc__)
@click.argument("model")
@click.option("--requests", type=click.IntRange(2, 64), default=8, show_default=True, metavar="N", help="At once.")
@click.option("--prompt", type=click.IntRange(1, 2**16), default=32, show_default=True, metavar="TOKENS")
@click.option("--new", type=click.IntRange(2, 2**16), default=128, show_default=True, metavar="TOKENS")
@click.option("--long", type=click.IntRange(1, 2**16), default=1500, show_default=True, metavar="TOKENS",
              help="The prompt that arrives while the others run.")  # fmt: skip
@click.option("--reserve", type=click.IntRange(1, 2**16), default=512, show_default=True, metavar="TOKENS",
              help="What a contiguous cache keeps for a sequence.")  # fmt: skip
@click.option("--stagger", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="STEPS",
              help="Between two arrivals, under continuous batching.")  # fmt: skip
@click.option("--sequential", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N",
              help="Requests of which one at a time is measured.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, 1024), default=default_threads, metavar="N")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--save", "keep", is_flag=True, help="Write the result into bench/results too.")
def main(model: str, threads: int, rounds: int, as_json: bool, keep: bool, **sizes: int) -> None:
    progress = Progress("")
    try:
        path, task = resolve(model).absolute(), Task(**sizes)
        progress.show("loading")
        with open_model(path, task, threads) as parts:
            made = result_of(measure(parts, task, rounds, progress.show), path, threads)
    except MiroError as error:
        raise Failure(str(error)) from error
    finally:
        progress.clear()
    if keep:
        click.echo(f"saved as bench/results/{save(made, kind='batching').name}", err=True)
    if as_json:
        click.echo(json.dumps(made))
        return
    for line in lines_of(made):
        click.echo(line)


if __name__ == "__main__":
    main()
