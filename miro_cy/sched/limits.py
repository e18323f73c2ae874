"""What is refused on arrival: plain arithmetic on fixed limits, safe in any thread."""

from __future__ import annotations

from dataclasses import dataclass

from miro_client.checks import shown
from miro_cy.errors import BadField, ContextOverflow, Unschedulable


@dataclass(frozen=True, slots=True)
class Limits:
    """max_context: tokens of a sequence, prompt and generated; capacity: tokens an empty KV pool holds of one."""

    max_context: int
    capacity: int

    def check(self, n_prompt: int, max_new: int) -> None:
        """Refuse a sequence that could never be served.

        Raises BadField (nothing in the prompt, negative max_new), ContextOverflow, or Unschedulable: what passes is
        sure to finish once it runs alone, so the scheduler can never wait for room that will not come.
        """
        if n_prompt < 1:
            raise BadField("the prompt has no tokens", field="prompt")
        if max_new < 0:
            raise BadField(f"max_tokens must be at least 0, not {shown(max_new)}", field="max_tokens")
        if n_prompt > self.max_context:
            raise ContextOverflow(
                f"the prompt has {n_prompt} tokens, the context holds {self.max_context}", field="prompt"
            )
        if n_prompt + max_new > self.max_context:
            stated = f"prompt ({n_prompt}) and max_tokens ({shown(max_new)})"
            raise ContextOverflow(f"{stated} exceed the context of {self.max_context} tokens", field="max_tokens")
        # The last generated token is never fed back, so its keys and values are never stored.
        stored = n_prompt + max(max_new - 1, 0)
        if stored > self.capacity:
            field = "prompt" if n_prompt > self.capacity else "max_tokens"
            raise Unschedulable(
                f"{stored} tokens of KV cache are needed, the whole pool holds {self.capacity}", field=field
            )
