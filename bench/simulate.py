"""The real scheduler, KV pool, block tables and prefix index under load, over a model of what a step costs.

A clock of its own makes a day of requests pass in minutes, and the same seed the same day. Who is admitted when under
each policy, what that does to waits, and what the scheduler itself costs: bench/README.md explains the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from miro_client.cli.console import Failure, Progress
from miro_cy.errors import MiroError
from simulation.plot import svg
from simulation.report import lines_of, result_of
from simulation.variants import POLICIES, Machine, capacity, overhead, sweep, variants
from simulation.workload import Shape
from simulation.world import StepCost


class Listed(click.ParamType):
    """Items with commas between them, each converted by another type; a tuple, each item once."""

    name = "list"

    def __init__(self, item: click.ParamType) -> None:
        self._item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # converted already
            return value
        return tuple(dict.fromkeys(self._item.convert(part.strip(), param, ctx) for part in str(value).split(",")))


LOADS = Listed(click.FloatRange(0.01, 10))
WATERMARKS = Listed(click.FloatRange(0, 0.5))
ARRIVALS = Listed(click.Choice(["poisson", "bursty"]))
#: Options that become fields of the workload, of what serves it, and of what a step costs.
SHAPE = (
    click.option("--requests", type=click.IntRange(1, 10**6), metavar="N", help="In each run."),
    click.option("--clients", type=click.IntRange(1, 10**5), metavar="N", help="The k-th asks in proportion to 1/k."),
    click.option("--lengths", type=click.Choice(["lognormal", "pareto"]), help="Tails of prompts and answers."),
    click.option("--shared", type=click.FloatRange(0, 1), metavar="SHARE", help="Prompts with a common beginning."),
    click.option("--prefixes", type=click.IntRange(1, 10**4), metavar="N", help="Common beginnings."),
    click.option("--prefix-tokens", type=click.IntRange(1, 10**4), metavar="N", help="Their length."),
    click.option("--seed", type=click.IntRange(0), metavar="N", help="The same seed gives the same figures."),
)
MACHINE = (
    click.option("--kv-tokens", type=click.IntRange(1), metavar="N", help="Tokens that the KV pool holds."),
    click.option("--block-size", type=click.Choice(["16", "32", "64"]), help="Tokens of a block."),
    click.option("--max-num-seqs", type=click.IntRange(1, 4096), metavar="N", help="Sequences that run at once."),
    click.option("--max-waiting", type=click.IntRange(1, 2**20), metavar="N", help="Beyond it, requests are refused."),
    click.option("--step-ms", type=click.FloatRange(1, 60_000), metavar="MS", help="Time target of a step."),
)
COST = tuple(
    click.option(f"--{name}", type=click.FloatRange(0, 10**6), metavar=name.rpartition("-")[2].upper(), help=text)
    for name, text in (
        ("pass-ms", "A step's pass over the weights."),
        ("row-ms", "A decode row."),
        ("token-ms", "A prompt token."),
        ("row-key-us", "A key that a decode row attends to."),
        ("token-key-us", "A key that a prompt token attends to."),
    )
)
DEFAULTS = Shape(requests=400)


def options(command: Any) -> Any:
    for option in reversed((*SHAPE, *MACHINE, *COST)):
        command = option(command)
    return command


def chosen(given: dict[str, Any], defaults: Any) -> dict[str, Any]:
    """Of the options, those that are fields of `defaults` and were given."""
    return {name: value for name, value in given.items() if hasattr(defaults, name) and value is not None}


@click.command(help=__doc__)
@click.option("--arrivals", type=ARRIVALS, default="poisson,bursty", show_default=True, metavar="LIST")
@click.option("--load", "loads", type=LOADS, default="0.9", show_default=True, metavar="LIST")
@click.option("--policy", "policies", type=Listed(click.Choice(POLICIES)), default=",".join(POLICIES),
              show_default=True, metavar="LIST")  # fmt: skip
@click.option("--watermark", "watermarks", type=WATERMARKS, default="0.01", show_default=True, metavar="LIST")
@options
@click.option("--live", type=click.IntRange(1, 4096), default=256, show_default=True, metavar="N",
              help="Live sequences at which the scheduler's own cost is measured.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write an SVG.")
def main(
    arrivals: Any, loads: Any, policies: Any, watermarks: Any, live: int, as_json: bool, plot: Path | None, **given: Any
) -> None:
    progress = Progress("")

    def tell(what: str, done: int, n: int) -> None:
        progress.show(f"{what}: {done:,} of {n:,} requests")

    shape = Shape(**({"requests": DEFAULTS.requests} | chosen(given, DEFAULTS)))
    size = {"block_size": int(given.pop("block_size") or Machine().block_size)}
    try:
        machine = Machine(cost=StepCost(**chosen(given, StepCost())), **chosen(given, Machine()), **size)
        rate = capacity(machine, shape, tell)
        own = overhead(machine, shape, live, tell)
        rows = list(sweep(machine, shape, rate, arrivals, loads, variants(policies, watermarks), tell))
    except MiroError as error:
        raise Failure(str(error)) from error
    finally:
        progress.clear()
    if plot is not None:
        plot.write_text(svg(rows), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result_of(shape, machine, rate, own, rows)))
        return
    for line in lines_of(shape, machine, rate, own, rows):
        click.echo(line)


if __name__ == "__main__":
    main()
