"""A worker under load over its socket: what a long prompt does to running streams, and what a common beginning saves.

With --llama-server, a program of that name built for this machine serves the same token ids in turns with the worker.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path

import click

from miro_client.cli.console import Failure, Progress
from miro_cy.errors import MiroError
from miro_cy.hub import resolve
from miro_cy.machine import default_threads
from peers.result import save
from peers.works import PeerError
from served.llama import llama_server
from served.prompts import Prompts
from served.report import lines_of, measure, result_of
from served.systems import Miro, Served
from served.worker import worker
from served.works import Load


@click.command(help=__doc__)
@click.argument("model")
@click.option("--llama-server", "program", type=click.Path(path_type=Path), metavar="PROGRAM")
@click.option("--streams", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N")
@click.option("--stream-words", type=click.IntRange(1, 10**5), default=120, show_default=True, metavar="N",
              help="Of the prompt of each.")  # fmt: skip
@click.option("--stream-new", type=click.IntRange(16, 10**5), default=1024, show_default=True, metavar="TOKENS",
              help="That a stream may run while the long prompt is computed.")  # fmt: skip
@click.option("--long-words", type=click.IntRange(1, 10**5), default=2000, show_default=True, metavar="N",
              help="Of the prompt that arrives while they run.")  # fmt: skip
@click.option("--users", type=click.IntRange(1, 64), default=8, show_default=True, metavar="N")
@click.option("--requests", type=click.IntRange(2, 10**4), default=24, show_default=True, metavar="N",
              help="Of all users together.")  # fmt: skip
@click.option("--prefix-words", type=click.IntRange(1, 10**5), default=600, show_default=True, metavar="N",
              help="That all their prompts begin with.")  # fmt: skip
@click.option("--words", type=click.IntRange(1, 10**5), default=20, show_default=True, metavar="N",
              help="Of each prompt beyond these.")  # fmt: skip
@click.option("--new", type=click.IntRange(1, 10**5), default=32, show_default=True, metavar="TOKENS",
              help="Of each answer.")  # fmt: skip
@click.option("--context", type=click.IntRange(64, 2**20), default=4096, show_default=True, metavar="TOKENS",
              help="Of a sequence, on both sides.")  # fmt: skip
@click.option("--step-ms", type=click.FloatRange(1, 60_000), metavar="MS", help="The worker's  [default: its own].")
@click.option("--threads", type=click.IntRange(1, 1024), default=default_threads, metavar="N")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--save", "keep", is_flag=True, help="Write the result into bench/results too.")
def main(
    model: str, program: Path | None, context: int, step_ms: float | None, threads: int, rounds: int, as_json: bool,
    keep: bool, **sizes: int,
) -> None:  # fmt: skip
    progress, load = Progress(""), Load(**sizes)
    try:
        path = resolve(model).absolute()
        prompts = Prompts.of_model(path)
        with ExitStack() as stack:
            progress.show("starting")
            _, endpoint = stack.enter_context(worker(str(path), context=context, threads=threads, step_ms=step_ms))
            miro = stack.enter_context(closing(Miro(endpoint)))
            systems: list[Served] = [miro]
            if program is not None:
                slots = max(load.users, load.streams + 1)
                peer = llama_server(program, path, slots=slots, context=context, threads=threads)
                systems.append(stack.enter_context(peer))
            found = measure(systems, load, prompts, miro.block_size, rounds, progress.show)
            made = result_of(found, load, path, threads, systems)
    except (PeerError, MiroError) as error:
        raise Failure(str(error)) from error
    finally:
        progress.clear()
    if keep:
        click.echo(f"saved as bench/results/{save(made, kind='serving').name}", err=True)
    if as_json:
        click.echo(json.dumps(made))
        return
    for line in lines_of(made):
        click.echo(line)


if __name__ == "__main__":
    main()
