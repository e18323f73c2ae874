"""What `miro bench` is to measure, and what each of its works needs."""

from __future__ import annotations

from dataclasses import dataclass

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
        for name, values, high in (
            ("prompt", self.prompts, MAX_LENGTH),
            ("rows", self.rows, MAX_ROWS),
            ("depth", self.depths, MAX_LENGTH),
            ("tokens", (self.tokens,), MAX_TOKENS),
            ("repeat", (self.repeat,), MAX_REPEAT),
        ):
            for value in values:
                _check(name, value, high)
        if not self.rows or not self.depths:
            raise ConfigError("rows and depths need at least one number each", field="rows")
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
        if self.kind == "prompt":
            _check("prompt", self.tokens, MAX_LENGTH)
            if (self.rows, self.depth) != (1, 0):
                raise ConfigError("a prompt is one row at depth 0", field="rows")
            return
        _check("rows", self.rows, MAX_ROWS)
        _check("depth", self.depth, MAX_LENGTH)
        _check("tokens", self.tokens, MAX_TOKENS)

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


def _check(name: str, value: object, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(f"{name} must be an integer between 1 and {high}, not {value!r:.80}", field=name)
