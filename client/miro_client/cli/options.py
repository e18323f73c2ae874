"""Options that several commands take, and what they must hold together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from miro_client.checks import MAX_INT32
from miro_client.cli.connecting import endpoint_of

DEFAULT_MODEL = "smollm2"
#: Options that shape the engine of this process, and so mean nothing with --connect.
ENGINE_OPTIONS = ("model", "threads", "compute", "kv_dtype", "max_context")


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The options in this order, as one decorator."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


source_options = _all(
    click.option(
        "--model", metavar="M", help=f"Model file or folder, or the name of a pulled model.  [default: {DEFAULT_MODEL}]"
    ),
    click.option(
        "--connect", metavar="ENDPOINT", help="Ask a worker; 'default' is where miro serve listens unless told."
    ),
)
engine_options = _all(
    click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads of the engine."),
    click.option("--compute", type=click.Choice(["fast", "exact", "bf16"]), help="Arithmetic of the engine."),
    click.option(
        "--kv-dtype", type=click.Choice(["fp16", "fp32", "int8", "bf16"]), help="Element type of the KV cache."
    ),
    click.option("--max-context", type=click.IntRange(1), metavar="N", help="Context of the engine in tokens."),
)


def sampling_options(*, max_tokens: int, temperature: str) -> Callable[[Any], Any]:
    """How an answer is drawn and when it ends. max_tokens, temperature: what --help says the defaults are."""
    whole, draw = click.IntRange(1, MAX_INT32), click.FloatRange(0, 1, min_open=True)
    return _all(
        click.option(
            "--max-tokens", type=whole, metavar="N", help=f"Most tokens of an answer.  [default: {max_tokens}]"
        ),
        click.option(
            "--temperature", type=click.FloatRange(0, 2), metavar="T", help=f"0 is greedy.  [default: {temperature}]"
        ),
        click.option(
            "--top-k", type=click.IntRange(-1, MAX_INT32), metavar="K", help="Draw among the K likeliest tokens."
        ),
        click.option("--top-p", type=draw, metavar="P", help="Draw among the likeliest P."),
        click.option("--seed", type=click.IntRange(-1, 2**64 - 1), metavar="N", help="Makes draws repeatable."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    )


choice_options = _all(
    click.option("--n", type=click.IntRange(1, 64), metavar="N", help="Draw N answers, each under its number."),
    click.option(
        "--beam-width",
        type=click.IntRange(1, 16),
        metavar="W",
        help="Search for the likeliest answers with W beams instead of drawing; all of them, or the best --n.",
    ),
)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for what click cannot tell: options that exclude each other, NaN, text that is not UTF-8."""
    for name in ("temperature", "top_p"):
        if options[name] is not None and math.isnan(options[name]):  # which passes every range
            raise click.UsageError(f"--{name.replace('_', '-')} must be a number")
    if options["system"] is not None:
        valid_text("--system", options["system"])
    for stop in options["stop"]:
        valid_text("--stop", stop)
    if options["model"] == "":
        raise click.UsageError("--model is empty")
    _check_beams(options)
    check_connect(options, ENGINE_OPTIONS)


def _check_beams(options: Mapping[str, Any]) -> None:
    """Raise UsageError for what SamplingParams would refuse beside beams, before a model is loaded for it."""
    width = options.get("beam_width") or 1
    if width == 1:
        return
    if (options["n"] or 1) > width:
        raise click.UsageError(f"--n is {options['n']}, more than a search with --beam-width {width} has")
    neutral: dict[str, tuple[object, ...]] = {
        "temperature": (None, 0, 1),
        "top_k": (None, -1, 0),
        "top_p": (None, 1),
        "stop": ((),),
    }
    for name, values in neutral.items():
        if options[name] not in values:
            raise click.UsageError(f"--{name.replace('_', '-')} has no meaning with --beam-width, which draws nothing")


def check_connect(options: Mapping[str, Any], engine_options: Iterable[str]) -> None:
    """Raise UsageError for options that shape an engine of this process beside --connect, and for no endpoint."""
    if options["connect"] is None:
        return
    for name in engine_options:
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is the worker's to choose: not with --connect")
    endpoint_of(options["connect"])


def valid_text(source: str, text: str) -> str:
    """The text. Raises UsageError when it is empty or is not valid Unicode."""
    if not text:
        raise click.UsageError(f"{source} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{source} is not valid UTF-8") from None
    return text


def sampling_of(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters: what was stated, else the defaults; greedy defaults give way to who asks for draws."""
    names = ("temperature", "top_k", "top_p", "seed", "n", "beam_width")
    stated = {name: options[name] for name in names if options.get(name) is not None}
    sampling = {**defaults, **stated}
    draws = any(name in stated for name in ("top_k", "top_p", "seed")) or stated.get("n", 1) > 1
    if draws and "temperature" not in stated and sampling.get("temperature") == 0:
        sampling["temperature"] = 1.0  # who filters, seeds or repeats draws wants draws
    if options["stop"]:
        sampling["stop"] = list(options["stop"])
    return sampling
