"""Chat templates: a model file's Jinja source, rendered as transformers renders it, in a bounded sandbox."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from miro_cy.errors import BadField, RequestError, Unsupported

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_PROMPT_CHARS = 8 * 1024 * 1024
MAX_MESSAGES = 10_000
_KEYS = frozenset({"role", "content"})


class ChatTemplate:
    """One model's chat template. Compiled when first used; any number of threads may render."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        self._source = source
        self._specials = dict(specials)
        self._lock = threading.Lock()
        self._compiled: jinja2.Template | None = None

    def render(self, messages: object, *, add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation.

        Raises BadField (field "messages") for messages that are malformed, too long or refused by the template,
        Unsupported when the template itself cannot be used or needs more work than `budget` allows.
        """
        checked = check_messages(messages)
        variables = {
            **self._specials,
            "messages": checked,
            "tools": None,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        from miro_cy.text import budget, sandbox

        try:
            return sandbox.render(self._template(), variables, MAX_PROMPT_CHARS)
        except RequestError:
            raise
        except budget.OutputTooLong:
            raise BadField(f"the prompt is longer than {MAX_PROMPT_CHARS} characters", field="messages") from None
        except budget.Refused as error:
            raise Unsupported(f"the model's chat template was stopped: {error}", field="messages") from None
        except Exception as error:  # a template may fail in any way Python can, mostly over messages it did not expect
            reason = f"{type(error).__name__}: {error}"
            raise BadField(f"the chat template cannot render these messages: {reason:.300}", field="messages") from None

    def _template(self) -> jinja2.Template:
        from miro_cy.text import sandbox

        with self._lock:
            if self._compiled is None:
                if len(self._source) > MAX_TEMPLATE_CHARS:
                    raise Unsupported(
                        f"the model's chat template has {len(self._source)} characters; the limit is "
                        f"{MAX_TEMPLATE_CHARS}",
                        field="messages",
                    )
                try:
                    self._compiled = sandbox.environment().from_string(self._source)
                except Exception as error:  # the parser's own error, or Python's for code nested too deep
                    reason = f"{type(error).__name__}: {error}"
                    raise Unsupported(
                        f"the model's chat template is not valid: {reason:.300}", field="messages"
                    ) from None
            return self._compiled


def check_messages(messages: object) -> list[dict[str, str]]:
    """A copy of the messages, every one a role and a content. Raises BadField saying which is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise BadField(f"messages must be a list, not {messages!r:.80}", field="messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadField(f"messages must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}", field="messages")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise BadField(f"messages[{index}] must be a map, not {message!r:.80}", field="messages")
    if set(message) != _KEYS:
        keys = ", ".join(sorted(map(repr, message)))
        raise BadField(f"messages[{index}] must have role and content, not {keys or 'nothing':.80}", field="messages")
    for key in ("role", "content"):
        value = message[key]
        if not isinstance(value, str):
            raise BadField(f"messages[{index}].{key} must be a string, not {value!r:.80}", field="messages")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadField(f"messages[{index}].{key} is not valid Unicode", field="messages") from None
    return {"role": message["role"], "content": message["content"]}
