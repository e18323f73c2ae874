"""`miro bench`: how fast a model runs here, or behind a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from miro_client.cli.bench_counts import Counts, joined
from miro_client.cli.bench_earlier import Earlier, read_earlier
from miro_client.cli.bench_sums import attention, compare
from miro_client.cli.bench_text import body, heading
from miro_client.cli.connecting import endpoint_of
from miro_client.cli.console import Failure, Progress, one_line, print_json, require_stdout
from miro_client.cli.options import check_connect, engine_options

#: Options that shape the engine of this process, and so mean nothing with --connect.
ENGINE_OPTIONS = ("threads", "compute", "kv_dtype", "max_context")
#: Options that name works; without them, --compare measures those of the earlier report.
WORK_OPTIONS = ("prompts", "rows", "depths", "tokens")
#: Fields of a plan.
PLAN_OPTIONS = (*WORK_OPTIONS, "repeat")


def load() -> click.Command:
    return bench


@click.command(
    epilog="""\b
    Examples:
      miro bench smollm2
      miro bench model.gguf --prompt 128,2048 --rows 1-8,16,32 --depth 32,1900
      miro bench smollm2 --load --json >earlier.json
      miro bench smollm2 --compare earlier.json
      miro bench --connect default --rows 1,4""",
)
@click.argument("model", required=False)
@click.option("--connect", metavar="ENDPOINT", help="Measure a worker; 'default' is where miro serve listens.")
@click.option(
    "--prompt", "prompts", type=Counts(1, 2**24), multiple=True, callback=joined, metavar="LIST",
    help="Lengths of prompts, as 128,512.  [default: 512, less where the context is short]",
)  # fmt: skip
@click.option(
    "--rows", type=Counts(1, 256), multiple=True, callback=joined, default=("1,8,32",), metavar="LIST",
    help="How many sequences decode at once, as 1-8,16.  [default: 1,8,32]",
)  # fmt: skip
@click.option(
    "--depth", "depths", type=Counts(1, 2**24), multiple=True, callback=joined, default=("32",), metavar="LIST",
    help="Tokens each of them has before, as 32,1900; two tell what attention takes.  [default: 32]",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(1, 65536), default=32, show_default=True, metavar="N",
    help="Tokens that each of them decodes.",
)  # fmt: skip
@click.option(
    "--repeat", type=click.IntRange(1, 1000), default=3, show_default=True, metavar="N",
    help="Repetitions, after one to warm up.",
)  # fmt: skip
@click.option("--profile", is_flag=True, help="Tell where the time of a step goes.")
@click.option("--load", is_flag=True, help="Time loading too, in processes of its own, and tell the memory it takes.")
@click.option(
    "--compare", "earlier_path", metavar="FILE",
    help="Put figures of an earlier --json report beside; measures its works unless others are named.",
)  # fmt: skip
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def bench(ctx: click.Context, model: str | None, as_json: bool, earlier_path: str | None, **options: Any) -> None:
    """Measure prompt, decode and batched decode speed of MODEL: a file, a folder, or the name of a pulled model.

    Each speed is the median of its repetitions. Beside it stands the share of what this machine can do: of its
    arithmetic at the kernels' instruction set, and of reading memory, both measured in the same run with as many
    threads. Let nothing else run meanwhile.

    LIST is numbers and ranges with commas between them, 1-8,16,32; options that take one may be repeated.

    With --connect a worker is measured through its socket; then only tokens a second are known.
    """
    if (model is None) == (options["connect"] is None):
        raise click.UsageError("give a MODEL, or --connect a worker: one of the two")
    if model == "":
        raise click.UsageError("MODEL is empty")
    check_connect(options, ENGINE_OPTIONS)
    for name in ("profile", "load"):
        if options[name] and options["connect"] is not None:
            raise click.UsageError(f"--{name} looks into an engine of this process: not with --connect")
    require_stdout()
    earlier = None if earlier_path is None else read_earlier(earlier_path)
    exactly: list[tuple[str, int, int, int]] = []
    if earlier is not None and all(ctx.get_parameter_source(name) is ParameterSource.DEFAULT for name in WORK_OPTIONS):
        exactly = _works_of(earlier, options)
    progress = Progress("")
    try:
        if model is None:
            report = _worker_report(options, exactly, progress)
        else:
            report = _engine_report(model, options, exactly, progress)
    finally:
        progress.clear()
    report["attention"] = attention(report)
    if earlier is not None:
        report["compare"] = compare(report, earlier)
    if as_json:
        print_json(report)
        return
    for line in heading(report):
        click.echo(one_line(line))  # names come from a file or a worker
    click.echo()
    for line in body(report):
        click.echo(line)


def _works_of(earlier: Earlier, options: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """The works of an earlier report, as a plan takes them; loading is one of them where there is an engine to load."""
    options["load"] = options["load"] or (earlier.load is not None and options["connect"] is None)
    decoded = [key.each for key in earlier.rows if key.work == "decode"]
    options["tokens"] = max(decoded, default=options["tokens"])
    return [(key.work, key.rows, key.depth, key.each) for key in earlier.rows]


def _engine_report(
    model: str, options: dict[str, Any], exactly: list[tuple[str, int, int, int]], progress: Progress
) -> dict[str, Any]:
    try:
        from miro_cy.tools.bench import run_bench
        from miro_cy.tools.plan import BenchPlan, Work
    except ModuleNotFoundError as error:
        if error.name != "miro_cy":
            raise
        raise Failure("measuring a model here needs the engine: pip install miro-cy; or use --connect") from error
    plan = BenchPlan(
        profile=options["profile"],
        load=options["load"],
        exactly=tuple(Work(*work) for work in exactly),  # type: ignore[arg-type]
        **{name: options[name] for name in PLAN_OPTIONS},
    )
    settings = {name: options[name] for name in ENGINE_OPTIONS if options[name] is not None}
    return asdict(run_bench(model, plan, progress=_teller(progress), **settings))


def _worker_report(
    options: dict[str, Any], exactly: list[tuple[str, int, int, int]], progress: Progress
) -> dict[str, Any]:
    endpoint = endpoint_of(options["connect"])
    from miro_client import Client
    from miro_client.cli.bench_worker import Work, WorkerPlan, run_bench

    works = tuple(Work(*work) for work in exactly)
    plan = WorkerPlan(exactly=works, **{name: options[name] for name in PLAN_OPTIONS})
    with Client(endpoint) as client:
        return asdict(run_bench(client, plan, progress=_teller(progress)))


def _teller(progress: Progress) -> Callable[[int, int, str], None]:
    return lambda done, total, what: progress.show(f"{100 * done // max(total, 1)} % {what}")
