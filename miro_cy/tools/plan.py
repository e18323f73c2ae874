"""What `miro bench` is to measure, and what each of its works needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from miro_client.checks import check_bool, check_choice, check_int, check_items, shown
from miro_cy.config import EngineConfig
from miro_cy.errors import ConfigError
from miro_cy.tools.report import Kind

DEFAULT_PROMPT = 512
#: More rows than this would leave prompts no room in a step.
MAX_ROWS = 256
MAX_LENGTH = 2**24
MAX_TOKENS = 2**16
MAX_REPEAT = 1000
MAX_WORKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure. prompts: their lengths (empty: DEFAULT_PROMPT, or what the context holds); rows: how many
    sequences decode at once; depths: tokens that each of them has before; tokens: steps timed; repeat: repetitions;
    exactly: if any, these works and no others; profile: tell where the time of a step goes; load: time loading too.

    Raises ConfigError naming the field when a value is out of range.
    """

    prompts: tuple[int, ...] = ()
    rows: tuple[int, ...] = (1, 8, 32)
    depths: tuple[int, ...] = (32,)
    tokens: int = 32
    repeat: int = 3
    exactly: tuple[Work, ...] = ()
    profile: bool = False
    load: bool = False

    def __post_init__(self) -> None:
        for attribute, name, high in (
            ("prompts", "prompt", MAX_LENGTH),
            ("rows", "rows", MAX_ROWS),
            ("depths", "depth", MAX_LENGTH),
        ):
            values = tuple(check_items(name, getattr(self, attribute), MAX_WORKS))
            for value in values:
                check_int(name, value, 1, high)
            object.__setattr__(self, attribute, values)
        check_int("tokens", self.tokens, 1, MAX_TOKENS)
        check_int("repeat", self.repeat, 1, MAX_REPEAT)
        check_bool("profile", self.profile)
        check_bool("load", self.load)
        exactly = tuple(check_items("exactly", self.exactly, MAX_WORKS, what="works"))
        if not all(isinstance(work, Work) for work in exactly):
            raise ConfigError(f"exactly must be a list of works, not {shown(exactly)}", field="exactly")
        object.__setattr__(self, "exactly", exactly)
        for name, values in (("rows", self.rows), ("depth", self.depths)):
            if not values:
                raise ConfigError("rows and depths need at least one number each", field=name)
        if (n := len(self.exactly) or len(self.prompts) + len(self.rows) * len(self.depths)) > MAX_WORKS:
            raise ConfigError(f"at most {MAX_WORKS} pieces of work are measured, not {n}", field="rows")

    def works(self, context: int) -> list[Work]:
        """The works, prompts first. Raises ConfigError for one that the context does not hold."""
        works = list(self.exactly)
        if not works:
            prompts = self.prompts or (min(DEFAULT_PROMPT, context - 1),)
            if context < 2:
                raise ConfigError(f"nothing can be measured in a context of {context}", field="max_context")
            works = [Work("prompt", 1, 0, n) for n in prompts]
            works += [Work("decode", rows, depth, self.tokens) for depth in self.depths for rows in self.rows]
        for work in works:
            if work.room > context:
                name = "prompt" if work.kind == "prompt" else "depth"
                raise ConfigError(f"{work} needs a context of {work.room} tokens, this is {context}", field=name)
        return list(dict.fromkeys(works))


@dataclass(frozen=True, slots=True)
class Work:
    """tokens: of the prompt, or of each row. depth: prompt of each row, 0 for a prompt.

    Raises ConfigError naming the field when a value is out of range.
    """

    kind: Kind
    rows: int
    depth: int
    tokens: int

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        if self.kind == "prompt":
            check_int("prompt", self.tokens, 1, MAX_LENGTH)
            check_int("rows", self.rows, 1, 1)
            check_int("depth", self.depth, 0, 0)
            return
        check_int("rows", self.rows, 1, MAX_ROWS)
        check_int("depth", self.depth, 1, MAX_LENGTH)
        check_int("tokens", self.tokens, 1, MAX_TOKENS)

    def __str__(self) -> str:
        if self.kind == "prompt":
            return f"prompt of {self.tokens}"
        return f"decode of {self.rows} row{'s' * (self.rows > 1)} at {self.depth}"

    @property
    def max_new(self) -> int:
        """Tokens that a sequence may generate: also those of steps in which other rows still have a prompt."""
        if self.kind == "prompt":
            return 1
        return self.tokens + 2 + -(-self.rows * self.depth // (EngineConfig().max_step_tokens - self.rows))

    @property
    def room(self) -> int:
        """Tokens of a sequence."""
        return self.max_new + (self.tokens if self.kind == "prompt" else self.depth)
