"""`miro run`: one prompt, one answer, streamed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from miro_client.cli.console import Failure, TextOut, remark, require_stdout

if TYPE_CHECKING:
    from miro_client.cli.answers import Answer, Ask, Question

DEFAULT_MODEL = "smollm2"
MAX_STDIN_BYTES = 16 << 20
#: Options that shape the engine of this process, and so mean nothing with --connect.
ENGINE_OPTIONS = ("model", "threads", "compute", "max_context")


def load() -> click.Command:
    return run


@click.command(
    epilog="""\b
    Examples:
      miro run "Why is the sky blue?"
      miro run --raw --max-tokens 20 "Once upon a time"
      git diff | miro run --system "Write a commit message."
      miro run --connect default --json "Hello" """,
)
@click.argument("prompt", required=False)
@click.option(
    "--model", metavar="M", help=f"Model file or folder, or the name of a pulled model.  [default: {DEFAULT_MODEL}]"
)
@click.option("--connect", metavar="ENDPOINT", help="Ask a worker; 'default' is where miro serve listens unless told.")
@click.option("--system", metavar="TEXT", help="System message, before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the model's chat template.")
@click.option("--max-tokens", type=click.IntRange(1, 2**31 - 1), metavar="N", help="Most tokens.  [default: 512]")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    metavar="T",
    help="0 is greedy.  [default: 0; 1 where --top-k, --top-p or --seed asks for draws]",
)
@click.option("--top-k", type=click.IntRange(-1, 2**31 - 1), metavar="K", help="Draw among the K likeliest tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), metavar="P", help="Draw among the likeliest P.")
@click.option("--seed", type=click.IntRange(-1, 2**64 - 1), metavar="N", help="Makes draws repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads of the engine.")
@click.option("--compute", type=click.Choice(["fast", "exact"]), help="Arithmetic of the engine.")
@click.option("--max-context", type=click.IntRange(1), metavar="N", help="Context of the engine in tokens.")
def run(prompt: str | None, as_json: bool, **options: Any) -> None:
    """Answer PROMPT, or what comes on standard input (UTF-8, less one line break at its end).

    Without --connect the model runs in this process. --json prints text, tokens, finish_reason, usage and timing.
    """
    _check_together(options)
    require_stdout()
    question = _question(_prompt(prompt), options)
    with _source(options) as ask:
        if as_json:
            _print_json(ask, question)
        else:
            _stream(ask, question)


def _check_together(options: dict[str, Any]) -> None:
    if options["raw"] and options["system"] is not None:
        raise click.UsageError("--system needs the chat template that --raw leaves out")
    for name in ("temperature", "top_p"):
        if options[name] is not None and math.isnan(options[name]):  # which passes every range
            raise click.UsageError(f"--{name.replace('_', '-')} must be a number")
    if options["model"] == "":
        raise click.UsageError("--model is empty")
    if options["connect"] is None:
        return
    for name in ENGINE_OPTIONS:
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is the worker's to choose: not with --connect")
    if options["connect"] != "default" and "://" not in options["connect"]:
        raise click.UsageError(f"--connect takes an endpoint such as ipc:///tmp/miro.sock, not {options['connect']!r}")


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return _valid("PROMPT", argument)
    if sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise click.UsageError("give a PROMPT, or pipe one in")
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise click.UsageError(f"the prompt on standard input has more than {MAX_STDIN_BYTES} bytes")
    return _valid("standard input", data.decode("utf-8", "surrogateescape").removesuffix("\n"))


def _valid(source: str, text: str) -> str:
    if not text:
        raise click.UsageError(f"{source} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{source} is not valid UTF-8") from None
    return text


def _question(prompt: str, options: dict[str, Any]) -> Question:
    from miro_client.cli.answers import Question

    sampling = {name: options[name] for name in ("temperature", "top_k", "top_p", "seed") if options[name] is not None}
    sampling.setdefault("temperature", 1.0 if sampling else 0.0)  # who filters or seeds draws wants draws
    if options["stop"]:
        sampling["stop"] = [_valid("--stop", stop) for stop in options["stop"]]
    system = options["system"]
    return Question(
        prompt=prompt,
        system=None if system is None else _valid("--system", system),
        raw=options["raw"],
        max_tokens=options["max_tokens"],
        sampling=sampling,
    )


@contextmanager
def _source(options: dict[str, Any]) -> Iterator[Ask]:
    """Who answers: the worker of --connect, else an engine made for this one call."""
    from miro_client.cli.answers import from_engine, from_worker

    if options["connect"] is not None:
        from miro_client import Client, default_endpoint

        endpoint = default_endpoint() if options["connect"] == "default" else options["connect"]
        with Client(endpoint) as client:
            yield from_worker(client)
        return
    try:
        from miro_cy import Engine
    except ModuleNotFoundError as error:
        if error.name != "miro_cy":
            raise
        raise Failure("running a model here needs the engine: pip install miro-cy; or use --connect") from error
    # One request, one sequence: memory for one context.
    chosen = {name: options[name] for name in ("threads", "compute", "max_context") if options[name] is not None}
    with Engine.load(options["model"] or DEFAULT_MODEL, max_num_seqs=1, **chosen) as engine:
        yield from_engine(engine)


def _stream(ask: Ask, question: Question) -> None:
    from miro_client.cli.answers import answer

    out = TextOut()
    result: Answer | None = None
    with closing(answer(ask, question)) as pieces:
        try:
            while True:
                out.write(next(pieces))
        except StopIteration as end:
            result = end.value
        except KeyboardInterrupt:
            out.end()
            raise
    out.end()
    if result is not None:
        _judge(result)


def _print_json(ask: Ask, question: Question) -> None:
    from miro_client.cli.answers import answer

    with closing(answer(ask, question)) as pieces:
        try:
            while True:
                next(pieces)
        except StopIteration as end:
            result: Answer = end.value
    click.echo(json.dumps(asdict(result), ensure_ascii=False).encode())
    _judge(result)


def _judge(result: Answer) -> None:
    """Say when the answer is not whole: to a person if a limit cut it, as a failure if it was ended from outside."""
    if result.finish_reason == "length":
        remark(f"[cut after {result.usage['completion_tokens']} tokens; --max-tokens sets how many]")
    elif result.finish_reason != "stop":
        raise Failure(f"the request was ended before its answer was complete ({result.finish_reason})")
