"""`miro chat`: questions and answers, each with what was said before."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from miro_client.cli.console import Failure, TextOut, print_json, remark, remark_cut, require_stdout
from miro_client.cli.options import (
    check_options,
    engine_options,
    sampling_of,
    sampling_options,
    source_options,
)
from miro_client.cli.turns import Interrupts, PipedInput, TerminalInput, Turn
from miro_client.errors import ContextOverflow, Draining, MiroError, RequestError, Restarted, Unschedulable, Unsupported

if TYPE_CHECKING:
    from miro_client.cli.conversation import Conversation

MAX_TOKENS = 2048
#: For models whose makers recommend nothing.
SAMPLING = {"temperature": 0.7, "top_p": 0.95}
HELP = '''\
/retry         ask the last question again
/undo          forget the last question and its answer
/clear         forget the whole conversation
/system TEXT   set the system message; without TEXT there is none
/help          this list
/exit          leave; so does Ctrl-D

Ctrl-C stops an answer, of which the conversation keeps what has come; at the prompt it drops the line.
Several lines: """ before the first and after the last, or a backslash at the end of each but the last.'''


def load() -> click.Command:
    return chat


@click.command(
    epilog="""\b
    Examples:
      miro chat
      miro chat --connect default --system "Answer in one sentence."
      miro chat --json < questions.txt > answers.jsonl""",
)
@source_options
@click.option("--system", metavar="TEXT", help="System message, before the conversation.")
@sampling_options(max_tokens=MAX_TOKENS, temperature="0.7, with a top-p of 0.95")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each question.")
@engine_options
def chat(as_json: bool, **options: Any) -> None:
    """Talk to a model. /help, typed as a question, lists the commands.

    Without --connect the model runs in this process. --temperature, --top-k and --top-p default to what the model's
    makers recommend (generation_config.json). Nothing that is said is written anywhere.

    Where standard input is no terminal, each of its lines is a question and answers alone are printed. With --json they
    have text, tokens, finish_reason, usage and timing; a question that failed has error and type, and the exit status
    is 1 in the end.
    """
    check_options(options)
    require_stdout()
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    from miro_client.cli.conversation import Conversation
    from miro_client.cli.source import open_source

    with ExitStack() as stack:
        source = stack.enter_context(open_source(options))
        about = source.about()
        if not about.has_template:
            raise Failure(f"{about.model} has no chat template that works, so it cannot chat; try: miro run --raw")
        terminal = sys.stdin.isatty()
        interrupts = Interrupts()
        if terminal:
            stack.callback(interrupts.install())
            remark(f"{about.model}, {about.context:,} tokens of context. /help lists the commands, Ctrl-D leaves.")
        conversation = Conversation(
            source.ask,
            interrupts if terminal else None,
            system=options["system"],
            max_tokens=options["max_tokens"],
            default_max_tokens=MAX_TOKENS,
            sampling=sampling_of(options, about.sampling or SAMPLING),
        )
        talk = Talk(conversation, terminal, as_json)
        turns = TerminalInput(interrupts) if terminal else PipedInput()
        while (turn := turns.turn()) is not None and talk.take(turn):
            pass
        if talk.failed and not terminal:
            raise Failure("not every question was answered")


class Talk:
    """Does what each turn asks for, and says what came of it. failed: a turn could not be done."""

    def __init__(self, conversation: Conversation, terminal: bool, as_json: bool) -> None:
        self._conversation = conversation
        self._terminal = terminal
        self._as_json = as_json
        self._dropped: str | None = None  # the last question, if it failed
        self.failed = False

    def take(self, turn: Turn) -> bool:
        """False when it asks to leave. Raises what makes it useless to go on."""
        if turn.command is not None:
            return self._command(turn.command, turn.text)
        if turn.text.strip():
            self._say(turn.text)
        return True

    def _command(self, name: str, text: str) -> bool:
        chat = self._conversation
        if name in ("exit", "quit", "bye"):
            return False
        if name in ("help", "?"):
            click.echo(HELP, err=True)
        elif name == "clear":
            chat.exchanges, self._dropped = [], None
            remark("[the conversation is forgotten]")
        elif name == "system":
            chat.system = text or None
            remark("[the system message is set]" if text else "[there is no system message]")
        elif name == "undo" and chat.exchanges:
            chat.exchanges, self._dropped = chat.exchanges[:-1], None
            remark("[the last question and its answer are forgotten]")
        elif name == "retry" and self._dropped is not None:
            self._say(self._dropped)
        elif name == "retry" and chat.exchanges:
            self._say(chat.exchanges[-1].question, instead_of_last=True)
        elif name in ("undo", "retry"):
            self._complain(f"/{name}: nothing was asked yet")
        else:
            self._complain(f'unknown command /{name}: /help lists them; between lines of """ it is a question')
        return True

    def _say(self, text: str, *, instead_of_last: bool = False) -> None:
        out = None if self._as_json else TextOut()
        try:
            result = self._conversation.say(text, out, instead_of_last=instead_of_last)
        except MiroError as error:
            if not instead_of_last:
                self._dropped = text
            self._fail(error)
            return
        self._dropped = None
        if self._as_json:
            print_json(result.as_json())
        if result.finish_reason == "length":
            remark_cut(result.usage["completion_tokens"])
        elif result.finish_reason == "cancelled":
            remark("[stopped]" if result.text else "[stopped before it began: the question is dropped]")

    def _fail(self, error: MiroError) -> None:
        """The question is dropped. Goes on where the next one may fare better."""
        if self._as_json:
            print_json({"error": error.message, "type": type(error).__name__})
        hint = ""
        if isinstance(error, ContextOverflow | Unschedulable):
            hint = " (the question is dropped; /clear and /undo make room)"
        # A model that cannot chat refuses the first question; later ones are refused for what they hold.
        hopeless = isinstance(error, Unsupported) and not self._conversation.exchanges
        lost = not isinstance(error, RequestError) or isinstance(error, Draining | Restarted)
        if hopeless or (lost and not self._terminal):
            raise error
        self._complain(error.message + hint)

    def _complain(self, text: str) -> None:
        self.failed = True
        Failure(text).show()
