"""`miro bench`: how fast a model runs here, or behind a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click

from miro_client.cli.connecting import endpoint_of
from miro_client.cli.console import Failure, Progress, one_line, print_json, require_stdout, size_text
from miro_client.cli.options import check_connect, engine_options

#: Options that shape the engine of this process, and so mean nothing with --connect.
ENGINE_OPTIONS = ("threads", "compute", "kv_dtype", "max_context")
#: Options that say what is measured: the fields of a plan.
PLAN_OPTIONS = ("prompts", "rows", "depths", "tokens", "repeat")


def load() -> click.Command:
    return bench


@click.command(
    epilog="""\b
    Examples:
      miro bench smollm2
      miro bench model.gguf --prompt 128 --prompt 2048 --rows 1 --rows 16 --depth 1024
      miro bench smollm2 --compute exact --json >bench.json
      miro bench --connect default --rows 1 --rows 4""",
)
@click.argument("model", required=False)
@click.option("--connect", metavar="ENDPOINT", help="Measure a worker; 'default' is where miro serve listens.")
@click.option(
    "--prompt", "prompts", type=click.IntRange(1, 2**24), multiple=True, metavar="N",
    help="Length of a prompt; may be repeated.  [default: 512, less where the context is short]",
)  # fmt: skip
@click.option(
    "--rows", type=click.IntRange(1, 256), multiple=True, default=(1, 8, 32), show_default=True, metavar="N",
    help="Sequences that decode at once; may be repeated.",
)  # fmt: skip
@click.option(
    "--depth", "depths", type=click.IntRange(1, 2**24), multiple=True, default=(32,), show_default=True, metavar="N",
    help="Tokens each of them has before; may be repeated.",
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
@engine_options
@click.option("--kv-dtype", type=click.Choice(["fp16", "fp32"]), help="Element type of the KV cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(model: str | None, as_json: bool, **options: Any) -> None:
    """Measure prompt, decode and batched decode speed of MODEL: a file, a folder, or the name of a pulled model.

    Each speed is the median of its repetitions. Beside it stands the share of what this machine can do: of its
    arithmetic at the kernels' instruction set, and of reading memory, both measured in the same run with as many
    threads. Let nothing else run meanwhile.

    With --connect a worker is measured through its socket; then only tokens a second are known.
    """
    if (model is None) == (options["connect"] is None):
        raise click.UsageError("give a MODEL, or --connect a worker: one of the two")
    if model == "":
        raise click.UsageError("MODEL is empty")
    check_connect(options, ENGINE_OPTIONS)
    if options["profile"] and options["connect"] is not None:
        raise click.UsageError("--profile looks into an engine of this process: not with --connect")
    require_stdout()
    progress = Progress("")
    try:
        report = _worker_report(options, progress) if model is None else _engine_report(model, options, progress)
    finally:
        progress.clear()
    if as_json:
        print_json(report)
        return
    for line in _heading(report):
        click.echo(one_line(line))  # names come from a file or a worker
    click.echo()
    for line in (*_table(report), *_profiles(report)):
        click.echo(line)


def _engine_report(model: str, options: dict[str, Any], progress: Progress) -> dict[str, Any]:
    try:
        from miro_cy.tools.bench import BenchPlan, run_bench
    except ModuleNotFoundError as error:
        if error.name != "miro_cy":
            raise
        raise Failure("measuring a model here needs the engine: pip install miro-cy; or use --connect") from error
    plan = BenchPlan(profile=options["profile"], **{name: options[name] for name in PLAN_OPTIONS})
    settings = {name: options[name] for name in ENGINE_OPTIONS if options[name] is not None}
    return asdict(run_bench(model, plan, progress=_teller(progress), **settings))


def _worker_report(options: dict[str, Any], progress: Progress) -> dict[str, Any]:
    endpoint = endpoint_of(options["connect"])
    from miro_client import Client
    from miro_client.cli.bench_worker import WorkerPlan, run_bench

    plan = WorkerPlan(**{name: options[name] for name in PLAN_OPTIONS})
    with Client(endpoint) as client:
        return asdict(run_bench(client, plan, progress=_teller(progress)))


def _teller(progress: Progress) -> Callable[[int, int, str], None]:
    return lambda done, total, what: progress.show(f"{100 * done // max(total, 1)} % {what}")


def _heading(report: dict[str, Any]) -> Iterator[str]:
    model, machine = report["model"], report["machine"]
    context = report["settings"]["context"]
    if "worker" in report:
        yield f"{model['name']} at {report['worker']['endpoint']}: {size_text(model['packed_bytes'])} packed"
        yield f"compute {model['compute']}, KV cache {model['kv_dtype']}, context {context:,}"
        yield f"its machine: {machine['isa']}, {machine['threads']} threads"
        return
    parts = f"{model['parameters'] / 1e6:,.0f} M parameters, {size_text(model['packed_bytes'])} packed"
    yield f"{model['name']}: {model['format']}, {parts}"
    yield f"compute {model['compute']}, KV cache {model['kv_dtype']}, context {context:,}"
    yield f"{machine['cpu']}: {machine['isa']}, {machine['threads']} threads of {machine['cpus']} CPUs"
    limits = report["limits"]
    yield (
        f"limits: read {limits['read_gb_per_s']:.1f} GB/s, float32 {limits['fma_gflops']:,.0f} GFLOP/s, "
        f"int8 {limits['int8_gflops']:,.0f} GFLOP/s"
    )


def _profiles(report: dict[str, Any]) -> Iterator[str]:
    """Milliseconds of a step by part, the longest first."""
    for row in report["rows"]:
        if (profile := row.get("profile")) is None:
            continue
        yield ""
        yield f"{row['work']} of {row['rows']} x {row['tokens'] // row['rows']} tokens, milliseconds a step:"
        total = sum(profile.values())
        for part, seconds in sorted(profile.items(), key=lambda item: -item[1]):
            yield f"  {part:<15}{1e3 * seconds / row['steps']:>10.3f}{100 * seconds / total:>7.1f} %"


def _table(report: dict[str, Any]) -> Iterator[str]:
    with_limits = "limits" in report
    titles = f"{'work':<8}{'tokens':>7}{'rows':>6}{'depth':>7}{'tok/s':>10}{'least':>10}{'most':>10}"
    yield titles + (f"{'GFLOP/s':>10}{'of peak':>9}{'GB/s':>8}{'of read':>9}  nearer limit" if with_limits else "")
    for row in report["rows"]:
        seconds = row["seconds"]
        each = row["tokens"] // row["rows"]
        line = f"{row['work']:<8}{each:>7}{row['rows']:>6}{row['depth']:>7}{row['tokens_per_second']:>10,.1f}"
        line += f"{row['tokens'] / seconds['max']:>10,.1f}{row['tokens'] / seconds['min']:>10,.1f}"
        if with_limits:
            line += f"{row['gflops']:>10,.1f}{100 * row['share_of_flops']:>7.1f} %{row['gb_per_s']:>8.2f}"
            line += f"{100 * row['share_of_bandwidth']:>7.1f} %  {row['bound']}"
        yield line
