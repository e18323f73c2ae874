"""miro-worker: serve a model on a ZeroMQ socket."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

import click

from miro_client import __version__
from miro_client.checks import MAX_INT32

#: With fewer, libzmq may take connections faster than they are hung up on.
FEW_DESCRIPTORS = 1024
#: Options that go to the engine as they are, if given.
ENGINE_OPTIONS = (
    click.option("--threads", type=click.IntRange(1), help="Compute threads [default: physical cores granted]."),
    click.option("--kv-memory", metavar="SIZE", help='KV cache, bytes or "4GiB" [default: a share of free memory].'),
    click.option(
        "--kv-dtype", type=click.Choice(["fp16", "fp32", "int8", "bf16"]), help="KV cache type [default: as compute]."
    ),
    click.option(
        "--compute", type=click.Choice(["fast", "exact", "bf16"]), help="Arithmetic [default: by file and machine]."
    ),
    click.option("--block-size", type=click.IntRange(1), help="Tokens in a KV block."),
    click.option("--max-context", type=click.IntRange(1), help="Tokens of context [default: the model's]."),
    click.option("--max-num-seqs", type=click.IntRange(1), help="Sequences that run at once."),
    click.option("--max-step-tokens", type=click.IntRange(1), help="Tokens in one step."),
    click.option("--step-ms", type=click.FloatRange(0, min_open=True), help="Time target of a step."),
    click.option(
        "--policy", type=click.Choice(["fcfs", "priority", "fair"]), help="Who is served next [default: first come]."
    ),
    click.option("--ageing-ms", type=click.FloatRange(0, min_open=True), help="Wait that weighs one priority level."),
    click.option(
        "--admission", type=click.Choice(["watermark", "reserve"]), help="Take requests by need, or reserve max_tokens."
    ),
    click.option("--watermark", type=click.FloatRange(0, 0.5), help="Share of the KV cache kept free at admission."),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=None,
        help="Keep KV blocks for prompts that begin alike [default: yes].",
    ),
    click.option("--seed", type=click.IntRange(0), help="Seed for requests that bring none."),
)


def engine_options(command: Any) -> Any:
    for option in reversed(ENGINE_OPTIONS):
        command = option(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    "-m",
    required=True,
    metavar="MODEL",
    help="A GGUF file, a Hugging Face folder, or the name of a pulled model.",
)
@click.option("--bind", metavar="ENDPOINT", help="ipc:// endpoint [default: a socket only this user can reach].")
@click.option("--grace-ms", type=click.IntRange(0, MAX_INT32), default=10_000, show_default=True,
              help="Time to finish at a stop.")  # fmt: skip
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
)
@engine_options
@click.version_option(__version__, message="%(prog)s %(version)s")
def main(model: str, bind: str | None, grace_ms: int, log_level: str, **options: Any) -> None:
    """Serve MODEL to many clients at once, until SIGTERM or Ctrl-C.

    Example: miro-worker --model smollm2 --bind ipc:///tmp/miro.sock
    """
    logging.basicConfig(
        stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from miro_client.errors import ConfigError, MiroError, Unavailable

    try:
        # A server's share of memory, unless told otherwise; the engine's own default is one context.
        given = {name: value for name, value in options.items() if value is not None}
        code = serve(model, bind, grace_ms, {"kv_memory": "auto", **given})
    except Unavailable as error:
        raise click.ClickException(error.message) from None
    except ConfigError as error:
        raise click.UsageError(error.message) from None
    except MiroError as error:
        raise click.ClickException(error.message) from None
    except Exception as error:
        logging.getLogger("miro").debug("the worker failed", exc_info=True)
        raise click.ClickException(f"internal error ({type(error).__name__}): {error}") from None
    logging.shutdown()
    if code:
        # A thread may still be inside the engine: neither close it nor wait for it.
        os._exit(code)


def serve(model: str, bind: str | None, grace_ms: int, options: dict[str, Any]) -> int:
    """Load the model, then serve it. Returns the exit code."""
    import resource

    from miro_cy import Engine
    from miro_worker.config import WorkerConfig
    from miro_worker.worker import Worker

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system's own limit may have been lowered below this one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is a descriptor
    if resource.RLIM_INFINITY != hard < FEW_DESCRIPTORS:
        logging.getLogger("miro.worker").warning(
            "at most %d descriptors: a flood of connections may end the worker", hard
        )
    engine: Any = Engine.load(model, **options)
    worker = Worker(engine, bind, config=WorkerConfig(grace_ms=grace_ms))

    about = engine.describe()
    cache = " ".join(f"{name}={about[name]}" for name in ("kv_dtype", "kv_bytes_per_token", "capacity"))

    def ready() -> None:
        print(
            f"ready endpoint={worker.endpoint} model={engine.name} context={engine.context} {cache}",
            file=sys.stderr,
            flush=True,
        )

    code = 1
    try:
        code = worker.run(ready, final=True)
    finally:
        if code == 0:
            engine.close()
    return code


if __name__ == "__main__":
    main()
