"""Chat templates: a model file's Jinja source, rendered as transformers renders it, in a bounded sandbox."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from miro_cy.errors import BadField, RequestError, Unsupported
from miro_cy.text.messages import check_messages

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE_CHARS = 64 * 1024
MAX_PROMPT_CHARS = 8 * 1024 * 1024


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
        from jinja2 import TemplateAssertionError

        from miro_cy.text import budget, sandbox

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
                except budget.Refused as error:
                    raise Unsupported(f"the model's chat template was refused: {error}", field="messages") from None
                except Exception as error:  # the parser's own error, or Python's for code nested too deep
                    reason = f"{type(error).__name__}: {error}"
                    if isinstance(error, TemplateAssertionError):  # a filter or test left out of the sandbox
                        raise Unsupported(
                            f"the model's chat template needs what miro does not offer: {error!s:.300}",
                            field="messages",
                        ) from None
                    raise Unsupported(
                        f"the model's chat template is not valid: {reason:.300}", field="messages"
                    ) from None
            return self._compiled
