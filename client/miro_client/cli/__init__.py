"""`miro`, the command line.

A command's module is imported when that command is called, and the engine, the worker or a socket only inside it, so
that `miro --help` is instant. Exit status: 0 done, 1 failed (one line on stderr), 2 wrong usage, 130 interrupted, 141
the reader of our output went away. MIRO_TRACEBACK=1 shows where a failure came from.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from miro_client import __version__
from miro_client.cli.console import Failure, flush_stdout, silence_stdout
from miro_client.errors import ConfigError, MiroError, Unavailable

INTERRUPTED = 130
PIPE_CLOSED = 141

#: Command name -> one line of help. The command `name` is `command` in miro_client.cli.<name>.
COMMANDS = {
    "bench": "Measure how fast a model runs.",
    "chat": "Talk to a model, here or through a worker.",
    "drain": "Make a worker finish and end.",
    "inspect": "Describe a model: sizes, types, memory.",
    "pull": "Fetch a model into the cache folder.",
    "run": "Answer one prompt, here or through a worker.",
    "serve": "Serve a model over ZeroMQ.",
    "status": "Say whether a worker is ready, and what it does.",
}


class LazyGroup(click.Group):
    """The commands of COMMANDS, imported on use; and the one place where an exception becomes an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"miro_client.cli.{cmd_name}")
        command: click.Command = module.load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # Help and version are printed outside `invoke`.
            Failure(_describe(error)).show()
            sys.exit(Failure.exit_code)
        finally:
            flush_stdout()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except (Failure, click.UsageError, click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:
            raise Failure(error.message) from error
        except Unavailable as error:
            raise Failure(str(error)) from error
        except ConfigError as error:  # a setting out of range is wrong usage, whoever found it
            raise click.UsageError(str(error)) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            silence_stdout()
            ctx.exit(PIPE_CLOSED)
        except Exception as error:
            if os.environ.get("MIRO_TRACEBACK") == "1":
                raise
            raise Failure(_describe(error)) from error
        return result


def _describe(error: Exception) -> str:
    if isinstance(error, MiroError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"internal error ({type(error).__name__}): {error} (MIRO_TRACEBACK=1 shows more)"


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Example: miro pull smollm2 && miro run "Why is the sky blue?"',
)
@click.version_option(__version__, prog_name="miro", message="%(prog)s %(version)s")
def main() -> None:
    """Large language models on this machine's CPUs."""
