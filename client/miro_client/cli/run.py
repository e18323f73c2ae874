"""`miro run`: one prompt, one answer, streamed."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from miro_client.cli.console import MAX_INPUT_BYTES, Failure, TextOut, print_json, remark_cut, require_stdout
from miro_client.cli.options import (
    check_options,
    choice_options,
    engine_options,
    sampling_of,
    sampling_options,
    source_options,
    valid_text,
)

if TYPE_CHECKING:
    from miro_client.cli.answers import Answer, Ask, Question


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
@source_options
@click.option("--system", metavar="TEXT", help="System message, before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the model's chat template.")
@sampling_options(max_tokens=512, temperature="0; 1 where --top-k, --top-p, --seed or --n asks for draws")
@choice_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
@engine_options
def run(prompt: str | None, as_json: bool, **options: Any) -> None:
    """Answer PROMPT, or what comes on standard input (UTF-8, less one line break at its end).

    Without --connect the model runs in this process. --json prints text, tokens, finish_reason, usage and timing; of
    several answers those of the first, and all in `choices`.
    """
    check_options(options)
    if options["raw"] and options["system"] is not None:
        raise click.UsageError("--system needs the chat template that --raw leaves out")
    require_stdout()
    question = _question(_prompt(prompt), options)
    from miro_client.cli.source import open_source

    with open_source(options) as source:
        if as_json:
            _print_json(source.ask, question)
        else:
            _stream(source.ask, question)


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return valid_text("PROMPT", argument)
    if sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise click.UsageError("give a PROMPT, or pipe one in")
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise click.UsageError(f"the prompt on standard input has more than {MAX_INPUT_BYTES} bytes")
    return valid_text("standard input", data.decode("utf-8", "surrogateescape").removesuffix("\n"))


def _question(prompt: str, options: dict[str, Any]) -> Question:
    from miro_client.cli.answers import Question

    system, raw = options["system"], options["raw"]
    said = [] if system is None else [{"role": "system", "content": system}]
    return Question(
        messages=None if raw else [*said, {"role": "user", "content": prompt}],
        text=prompt if system is None else None,  # a system message is never dropped
        max_tokens=options["max_tokens"],
        sampling=sampling_of(options, {"temperature": 0.0}),
    )


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
    print_json(result.as_json())
    _judge(result)


def _judge(result: Answer) -> None:
    """Say when an answer is not whole: to a person if a limit cut it, as a failure if it was ended from outside."""
    answers = result.choices or [result]
    for one in answers:
        if one.finish_reason not in ("stop", "length"):
            raise Failure(f"the request was ended before its answer was complete ({one.finish_reason})")
    cut = [one.usage["completion_tokens"] for one in answers if one.finish_reason == "length"]
    if cut:
        remark_cut(max(cut))
