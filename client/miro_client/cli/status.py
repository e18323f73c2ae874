"""`miro status`: whether a worker is well, and what it has done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from miro_client.cli.connecting import connect_option, endpoint_of
from miro_client.cli.console import one_line, print_json, require_stdout, size_text

if TYPE_CHECKING:
    from miro_client.wire import HealthReply, ModelInfo, StatsReply


def load() -> click.Command:
    return status


@click.command(
    epilog="""\b
    Examples:
      miro status
      miro status --connect ipc:///tmp/miro.sock --json""",
)
@connect_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: health, stats and models.")
def status(connect: str, as_json: bool) -> None:
    """Say whether a worker is ready, and what it has done since its start.

    Answered within a moment whatever it is busy with. The exit status is 0 when it is ready, 1 when it is not or when
    there is none.
    """
    endpoint = endpoint_of(connect)
    require_stdout()
    from msgspec.structs import asdict

    from miro_client import Client

    with Client(endpoint) as client:
        health, stats, models = client.health(), client.stats(), client.models()
    if as_json:
        found = {"health": asdict(health), "stats": asdict(stats), "models": [asdict(model) for model in models]}
        print_json(found)
    else:
        for label, text in _lines(health, stats, models):
            click.echo(f"{label:<12}{one_line(text)}")
    if not health.ready:
        raise click.exceptions.Exit(1)


def _lines(health: HealthReply, stats: StatsReply, models: list[ModelInfo]) -> Iterator[tuple[str, str]]:
    stalled = f" for {health.stalled_ms / 1e3:.0f} s" if health.stalled_ms else ""
    yield "status", f"{health.status}{stalled}, up {_duration(health.uptime_ms / 1e3)}"
    for model in models:
        yield "model", f"{model.name}, context {model.context:,} tokens"
    now = f"{stats.running:,} running, {stats.waiting:,} waiting, {stats.preparing:,} being prepared"
    yield "now", f"{now}; {stats.peers:,} connections"
    ways = [f"{count:,} {reason}" for reason, count in sorted(stats.ended.items())]
    ways += [f"{count:,} refused ({code})" for code, count in sorted(stats.refused.items())]
    ways += [f"{stats.abandoned:,} abandoned"] if stats.abandoned else []
    yield "requests", f"{stats.requests:,}" + (f": {', '.join(ways)}" if ways else "")
    prompts = f"{stats.prompt_tokens:,} of prompts ({stats.cached_tokens:,} cached)"
    yield "tokens", f"{prompts}, {stats.generated_tokens:,} generated, {stats.steps:,} steps"
    used = stats.total_blocks - stats.free_blocks - stats.cached_blocks
    yield "KV blocks", f"{used:,} of {stats.total_blocks:,} in use, {stats.preemptions:,} preemptions"
    if stats.resident_bytes:
        yield "memory", size_text(stats.resident_bytes)


def _duration(seconds: float) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f} d {hours % 24:.0f} h"
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"
