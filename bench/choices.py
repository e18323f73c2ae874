"""What several answers to one prompt cost: the time and KV blocks of n choices, beside the least they could take.

The least is the prompt once, measured with another prompt of that length, and as many steps with n rows as an answer
has tokens, measured with n separate requests that find the prompt computed and so begin together.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import median

import click
import numpy as np

from miro_client.cli.console import Failure, Progress
from miro_cy import Engine, Request, SamplingParams
from miro_cy.errors import MiroError
from miro_cy.machine import default_threads


@dataclass(frozen=True, slots=True)
class Ran:
    """seconds: from the first request to the last token. first: to the first token of all. blocks: most in use."""

    seconds: float
    first: float
    blocks: int


def run(engine: Engine, requests: list[Request]) -> Ran:
    """Run requests together, with nothing else."""
    began = time.perf_counter()
    first, blocks, waits = 0.0, 0, {engine.add(request) for request in requests}
    while engine.has_work:
        for event in engine.step():
            waits.discard(event.request_id)
        if not waits and not first:
            first = time.perf_counter() - began
        stats = engine.stats()
        blocks = max(blocks, stats["total_blocks"] - stats["free_blocks"] - stats["cached_blocks"])
    return Ran(time.perf_counter() - began, first, blocks)


def measure(engine: Engine, n: int, prompt: int, new: int, seed: int) -> dict[str, float]:
    """One round, with prompts that no earlier one had."""
    rng = np.random.default_rng(seed)

    def prompt_tokens() -> list[int]:
        return rng.integers(0, engine.vocab_size, prompt).tolist()

    def request(tokens: list[int], choices: int, seed: int) -> Request:
        return Request({"tokens": tokens}, SamplingParams(n=choices, max_tokens=new, ignore_eos=True, seed=seed))

    alone = run(engine, [request(prompt_tokens(), 1, seed)])
    tokens = prompt_tokens()
    together = run(engine, [request(tokens, n, seed)])
    cached = run(engine, [request(tokens, 1, seed + i) for i in range(n)])
    decode = cached.seconds - cached.first
    return {
        "choices_s": together.seconds,
        "prompt_s": alone.first,
        "decode_s": decode,
        "ratio": together.seconds / (alone.first + decode),
        "choices_blocks": together.blocks,
        "requests_blocks": n * -(-(prompt + new - 1) // engine.config.block_size),
    }


@click.command(help=__doc__)
@click.argument("model")
@click.option("--n", type=click.IntRange(2, 64), default=8, show_default=True, metavar="CHOICES")
@click.option("--prompt", type=click.IntRange(1, 2**16), default=500, show_default=True, metavar="TOKENS")
@click.option("--new", type=click.IntRange(2, 2**16), default=64, show_default=True, metavar="TOKENS")
@click.option("--threads", type=click.IntRange(1, 1024), default=default_threads, metavar="N")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def main(model: str, n: int, prompt: int, new: int, threads: int, rounds: int, as_json: bool) -> None:
    progress = Progress("")
    try:
        progress.show("loading")
        with Engine.load(model, threads=threads, max_num_seqs=n) as engine:
            measure(engine, n, prompt, new, 0)
            made = []
            for i in range(rounds):
                progress.show(f"round {i + 1} of {rounds}")
                made.append(measure(engine, n, prompt, new, i + 1))
            block = engine.config.block_size
    except MiroError as error:
        raise Failure(str(error)) from error
    finally:
        progress.clear()
    if as_json:
        click.echo(json.dumps({"n": n, "prompt": prompt, "new": new, "block_size": block, "rounds": made}))
        return
    middle = {name: median(one[name] for one in made) for name in made[0]}
    ratios = [one["ratio"] for one in made]
    click.echo(f"{n} choices of {prompt} + {new} tokens, median of {rounds} rounds")
    click.echo(f"time    {1e3 * middle['choices_s']:.0f} ms; prompt {1e3 * middle['prompt_s']:.0f} ms + "
               f"{new} steps of {n} rows {1e3 * middle['decode_s']:.0f} ms")  # fmt: skip
    click.echo(f"ratio   {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    click.echo(
        f"blocks  {middle['choices_blocks']:.0f} of {block} tokens; {middle['requests_blocks']:.0f} without sharing"
    )


if __name__ == "__main__":
    main()
