"""Who answers: the worker of --connect, else an engine made for this one command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miro_client.cli.answers import Ask, from_engine, from_worker
from miro_client.cli.connecting import endpoint_of
from miro_client.cli.console import Failure, Progress
from miro_client.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from miro_cy import Engine


@dataclass(frozen=True, slots=True)
class About:
    """What answers. context: tokens. sampling: what the model's makers recommend, empty where that is not known.

    has_template: whether it can chat.
    """

    model: str
    context: int
    sampling: Mapping[str, Any]
    has_template: bool


@dataclass(frozen=True, slots=True)
class Source:
    """about() asks a worker, and so raises ConnectionLost where there is none."""

    ask: Ask
    about: Callable[[], About]


@contextmanager
def open_source(options: Mapping[str, Any]) -> Iterator[Source]:
    """The source that the options name; see `options.source_options` and `options.engine_options`."""
    if options["connect"] is not None:
        from miro_client import Client

        with Client(endpoint_of(options["connect"])) as client:

            def about() -> About:
                (model,) = client.models(None)  # no time limit of its own: the connection's says better what is wrong
                return About(model.name, model.context, model.sampling, model.chat)

            yield Source(from_worker(client), about)
        return
    with _engine(options) as engine:

        def about() -> About:
            return About(engine.name, engine.context, engine.generation.sampling, engine.tokenizer.has_template)

        yield Source(from_engine(engine), about)


def _engine(options: Mapping[str, Any]) -> Engine:
    try:
        from miro_cy import Engine
    except ModuleNotFoundError as error:
        if error.name != "miro_cy":
            raise
        raise Failure("running a model here needs the engine: pip install miro-cy; or use --connect") from error
    model = options["model"] or DEFAULT_MODEL
    settings = ("threads", "compute", "kv_dtype", "max_context")
    chosen = {name: options[name] for name in settings if options[name] is not None}
    progress = Progress(model)
    try:
        # One request and its choices: memory for one context.
        sequences = max(options.get("n") or 1, options.get("beam_width") or 1)
        return Engine.load(model, max_num_seqs=sequences, progress=progress.loading, **chosen)
    finally:
        progress.clear()
