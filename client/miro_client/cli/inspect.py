"""`miro inspect`: what a model is and what it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from miro_client.cli.connecting import endpoint_of
from miro_client.cli.console import Failure, one_line, print_json, require_stdout, size_text

if TYPE_CHECKING:
    from miro_client.wire import ModelInfo
    from miro_cy.inspect import ModelReport


def load() -> click.Command:
    return inspect


@click.command(
    epilog="""\b
    Examples:
      miro inspect smollm2
      miro inspect ./Llama-3.2-1B --context 8192 --json
      miro inspect smollm2 --fit 24GiB --context 2048
      miro inspect --connect default""",
)
@click.argument("model", required=False)
@click.option("--connect", metavar="ENDPOINT", help="Describe what a worker serves; 'default' is the usual one.")
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="N",
    help="Reckon with sequences of N tokens, in --fit too, not of the most that the model was made for.",
)
@click.option("--fit", metavar="SIZE", help='Tell what KV cache fits into that memory, as "24GiB".')
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model: str | None, connect: str | None, context: int | None, fit: str | None, as_json: bool) -> None:
    """Describe MODEL: a GGUF file, a Hugging Face folder, or the name of a pulled model.

    Only headers are read. Memory is what the weights take once packed, the buffers of a step, and the KV cache of one
    context; capacity, how many tokens the KV cache would hold on this machine now with default settings. --fit tells
    how many it holds in memory of another size, and how many sequences of the context. Of layers with a sliding window
    a sequence keeps only what they see: what that saves is told too. With --connect, a worker says what it serves.
    """
    if (model is None) == (connect is None):
        raise click.UsageError("give a MODEL, or a worker with --connect")
    require_stdout()
    if connect is not None:
        for name, value in (("context", context), ("fit", fit)):
            if value is not None:
                raise click.UsageError(f"--{name} is the worker's to choose: not with --connect")
        _ask_worker(endpoint_of(connect), as_json)
        return
    assert model is not None
    try:
        from miro_cy.inspect import inspect_model
    except ModuleNotFoundError as error:
        if error.name != "miro_cy":
            raise
        raise Failure("miro inspect needs the engine: pip install miro-cy") from error
    report = inspect_model(model, context, fit)
    if as_json:
        print_json(asdict(report))
        return
    for label, text in _lines(report):
        # Names come from the file: on a terminal they must stay on their line.
        click.echo(f"{label:<18}{one_line(text)}")


def _ask_worker(endpoint: str, as_json: bool) -> None:
    from msgspec.structs import asdict

    from miro_client import Client

    with Client(endpoint) as client:
        models = client.models()
    if as_json:
        print_json({"models": [asdict(model) for model in models]})
        return
    for model in models:
        for label, text in _served(model):
            click.echo(f"{label:<18}{one_line(text)}")


def _served(model: ModelInfo) -> Iterator[tuple[str, str]]:
    yield "model", model.name
    yield "architecture", f"{model.architecture}, {model.layers:,} layers, vocabulary of {model.vocab_size:,}"
    yield "context", f"{model.context:,} tokens"
    yield "compute", f"{model.compute} on {model.isa}, {model.threads} threads"
    yield "weights", size_text(model.weight_bytes)
    cache = f"{model.capacity:,} tokens of {model.kv_bytes_per_token:,} bytes in {model.kv_dtype}"
    yield "KV cache", f"{size_text(model.capacity * model.kv_bytes_per_token)}: {cache}, blocks of {model.block_size}"
    yield "prompts", "text, messages and token ids" if model.text else "token ids only"
    yield "fingerprint", model.fingerprint


def _lines(report: ModelReport) -> Iterator[tuple[str, str]]:
    r = report
    yield "model", r.name
    yield "path", r.path
    yield "format", f"{r.format}, architecture {r.architecture}"
    yield "parameters", f"{r.parameters:,} in {size_text(r.bytes)}"
    for kind, share in r.types.items():
        percent = 100 * share.bytes / r.bytes
        yield f"  {kind}", f"{share.tensors:,} tensors, {size_text(share.bytes)} ({percent:.1f} %)"
    yield "layers", f"{r.layers}, hidden size {r.hidden_size:,}, inner size {r.ffn_size:,}"
    yield "heads", f"{r.heads} of {r.head_dim} dimensions, {r.kv_heads} for keys and values"
    tied = ", output tied to the embedding" if r.tied_output else ""
    yield "vocabulary", f"{r.vocab_size:,} tokens{tied}"
    yield "tokenizer", r.tokenizer if r.tokenizer_supported else f"{r.tokenizer} (not supported: token ids only)"
    yield "context", f"{r.max_context:,} tokens, RoPE base {r.rope_theta:,g}, scaling {r.rope_scaling}"
    (dtype, first), *others = r.kv_bytes_per_token.items()
    cache = [f"{first:,} bytes a token in {dtype}", *(f"{n:,} in {dtype}" for dtype, n in others)]
    yield "KV cache", ", ".join(cache)
    windows = any(group.window for group in r.kv_groups)
    if windows:
        yield "windows", ", ".join(_windows(r))
    if r.problem is not None:
        yield "unsupported", r.problem
        return
    yield "memory", f"at {r.context:,} tokens:"
    for dtype, memory in r.memory.items():
        parts = f"weights {size_text(memory.weights)} + buffers {size_text(memory.activations)}"
        full = f" ({size_text(memory.kv_full)} without windows)" if windows else ""
        yield _label(r, dtype), f"{size_text(memory.total)} = {parts} + KV cache {size_text(memory.kv)}{full}"
    yield "capacity", f"with the default share of the {size_text(r.available)} that are free here:"
    for dtype, capacity in r.capacity.items():
        many = ""
        if windows:
            whole = _whole(r, dtype)
            many = f": {capacity.worker_sequences:,} and {capacity.engine_sequences:,} sequences of {r.context:,}, "
            many += f"{capacity.worker // whole:,} and {capacity.engine // whole:,} without windows"
        yield _label(r, dtype), f"{capacity.worker:,} tokens for a worker, {capacity.engine:,} in a program{many}"
    yield from _fits(r)


def _label(report: ModelReport, dtype: str) -> str:
    return f"  {dtype} (default)" if dtype == report.kv_dtype else f"  {dtype}"


def _windows(report: ModelReport) -> Iterator[str]:
    """What its layers see: "4 layers x all tokens", "5 groups of 4 layers x 1,024 tokens"."""
    for group, count in Counter(report.kv_groups).items():
        layers = f"{group.layers} layer{'s' * (group.layers != 1)}"
        groups = f"{count} groups of " if count > 1 else ""
        yield f"{groups}{layers} x {f'{group.window:,}' if group.window else 'all'} tokens"


def _whole(report: ModelReport, dtype: str) -> int:
    """Tokens that a sequence of the context takes in whole blocks, if there are no windows."""
    return report.memory[dtype].kv_full // report.kv_bytes_per_token[dtype]


def _fits(report: ModelReport) -> Iterator[tuple[str, str]]:
    for dtype, fit in report.fit.items():
        if dtype == next(iter(report.fit)):
            taken = f"weights {size_text(fit.weights)}, buffers {size_text(fit.activations)}"
            yield "fit", f"{fit.total:,} bytes: {taken}, and a KV cache of"
        many = f"{fit.sequences:,} sequence{'s' * (fit.sequences != 1)} of {fit.context:,}"
        if fit.context < report.context:
            many = f"sequences of up to {fit.context:,}"
        elif any(group.window for group in report.kv_groups):
            many += f", {fit.tokens // _whole(report, dtype):,} without windows"
        yield _label(report, dtype), f"{fit.tokens:,} tokens in {size_text(fit.left)}: {many}"
