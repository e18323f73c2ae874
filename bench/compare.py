"""The engine beside llama.cpp, same file and threads, interleaved A B A B; ratios of the rounds, median and spread.

Two kinds of llama.cpp. The xllamacpp wheel (extra [peers]) runs its HTTP server in this process; both then answer whole
requests. With --native, a folder with llama-bench and llama-batched-bench, miro's figures are those of its steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from miro_client.cli.bench_counts import Counts, joined
from miro_client.cli.console import Failure, Progress
from miro_cy.errors import MiroError
from miro_cy.hub import resolve
from miro_cy.inspect import inspect_model
from miro_cy.machine import default_threads
from peers.engines import by_requests, by_steps, context_of
from peers.measure import measure
from peers.native import Native
from peers.result import lines_of, result_of, save
from peers.wheel import Wheel
from peers.works import SHORT, Chosen, PeerError, System

#: What is compared unless something is chosen.
ALL = {"prompts": (512, 256), "requests": (1, 8, 16, 32), "depths": (1900,), "load": True}
LOAD_STEPS = "start to first token"
LOAD_SERVER = "load to ready"


@contextmanager
def systems(path: Path, chosen: Chosen, threads: int, native: Path | None) -> Iterator[tuple[System, System]]:
    """Both, ready."""
    if native is not None:
        peer = Native(native, path, threads)
        with by_steps(path, chosen, threads) as miro:
            yield miro, peer
        return
    about = inspect_model(path)
    slots, context = max(chosen.requests, default=1), min(context_of(chosen), about.max_context)
    with by_requests(path, chosen, threads) as engine:
        yield engine, Wheel(path, context=context, slots=slots, threads=threads, vocab_size=about.vocab_size)


@click.command(help=__doc__)
@click.argument("model")
@click.option("--native", type=click.Path(path_type=Path), metavar="DIR", help="Folder of llama.cpp's own programs.")
@click.option(
    "--prompt", "prompts", type=Counts(1, 2**20), multiple=True, callback=joined, metavar="LIST",
    help="Lengths of prompts, as 256,512.",
)  # fmt: skip
@click.option(
    "--requests", type=Counts(1, 256), multiple=True, callback=joined, metavar="LIST",
    help="How many requests decode at once, as 1-8,16.",
)  # fmt: skip
@click.option(
    "--depth", "depths", type=Counts(SHORT + 1, 2**20), multiple=True, callback=joined, metavar="LIST",
    help=f"Tokens before a decode of one request; attention is what a token takes more than at depth {SHORT}.",
)  # fmt: skip
@click.option("--load", is_flag=True, help="Compare loading. Without any of these four, all of them are compared.")
@click.option("--threads", type=click.IntRange(1, 1024), default=default_threads, metavar="N")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--save", "keep", is_flag=True, help="Write the result into bench/results too.")
def main(model: str, native: Path | None, threads: int, rounds: int, as_json: bool, keep: bool, **options: Any) -> None:
    chosen_options = options if any(options.values()) else ALL
    title = (LOAD_SERVER if native is None else LOAD_STEPS) if chosen_options["load"] else None
    chosen = Chosen(**{**chosen_options, "load": title})
    progress = Progress("")
    try:
        path = resolve(model).absolute()
        if not path.is_file():
            raise PeerError("llama.cpp loads a GGUF file, not a folder")
        works = chosen.works(inspect_model(path).layers)
        with systems(path, chosen, threads, native) as (miro, peer):
            rows = measure(miro, peer, works, rounds, tell=progress.show)
            result = result_of(rows, peer, path, threads=threads, rounds=rounds, arithmetic=miro.arithmetic)
    except (PeerError, MiroError) as error:
        raise Failure(str(error)) from error
    finally:
        progress.clear()
    if keep:
        click.echo(f"saved as bench/results/{save(result).name}", err=True)
    if as_json:
        click.echo(json.dumps(result))
        return
    for line in lines_of(result, peer.name):
        click.echo(line)


if __name__ == "__main__":
    main()
