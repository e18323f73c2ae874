"""A Jinja environment for templates nobody vouches for: no access to Python, and bounded work.

Jinja's sandbox keeps a template away from Python's internals; it does not stop one that loops for ever or builds a
terabyte. So a parsed template is rewritten to pay into its `Budget` wherever it loops, compares, concatenates, slices
or prints; calls and operators pay in the environment's hooks; and what one operation could multiply ("x" * 10**9) is
checked before it is done. Otherwise rendering follows transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from miro_cy.text import filters
from miro_cy.text.budget import ELEMENT, STEP, Budget, OutputTooLong, Refused, current, measured, sized, text

MAX_INT_BITS = 4096

# Methods that make much of little, or bytes, whose methods would all need the same care.
_REFUSED_METHODS: dict[type, frozenset[str]] = {
    str: frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "maketrans", "encode"}),
    int: frozenset({"to_bytes", "from_bytes"}),
}
# A width of four digits, one taken from an argument, or one inside the braces of another.
_WIDE_FORMAT = re.compile(r"\*|\d{4}|\{[^}]*\{")
_SMALL_LITERAL = 16
_CALL = 8 * STEP


def render(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    """The rendered text.

    Raises Refused when it breaks a limit, OutputTooLong, BadField when the template calls raise_exception, or whatever
    error the template makes.
    """
    token = current.set(Budget())
    try:
        parts: list[str] = []
        length = 0
        for part in template.generate(**variables):
            length += len(part)
            if length > max_chars:
                raise OutputTooLong
            parts.append(part)
        return "".join(parts)
    except jinja2.exceptions.SecurityError as error:
        raise Refused(str(error)) from None
    finally:
        current.reset(token)


class _Rounds:
    """A loop's iterable that pays for each round."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = current.get()
        for item in self._items:
            budget.charge(STEP)
            yield item

    def __len__(self) -> int:
        return len(self._items)


class _Guards(NodeTransformer):
    """Routes what a template does through the budget, by filters that only this environment has."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("miro_rounds", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("miro_measured", node.expr)
        for operand in node.ops:
            operand.expr = _through("miro_measured", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("miro_concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("miro_sized", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through("miro_sized", node) if len(node.items) > _SMALL_LITERAL else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through("miro_sized", node) if len(node.items) > _SMALL_LITERAL else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        # Tuples can be hashed, which visits all they hold; so they are paid for when made.
        return _through("miro_measured", node) if node.ctx == "load" else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        # As an expression, plain text passes through `_finalize` too, and so is paid for in every round.
        node.nodes = [
            nodes.Const(item.data, lineno=item.lineno) if isinstance(item, nodes.TemplateData) else item
            for item in node.nodes
        ]
        return node


def _through(name: str, node: nodes.Node) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Guards().visit(source), name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _REFUSED_METHODS.items():
            if attr in names and (isinstance(obj, kind) or obj is kind):
                return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        layout: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(layout, layout.count("{"), [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        current.get().charge(_CALL)
        owner = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "replace":
                filters.check_replace(owner, *args)
            elif name == "join":
                return filters.joined(args[0] if args else (), owner)
        elif isinstance(owner, (list, tuple)):  # count and index compare
            measured(owner)
            measured(args)
        return sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return measured(result) if isinstance(result, tuple) else result


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for an operation before it is done, or refuse it."""
    budget = current.get()
    budget.charge(STEP)
    if operator == "%" and isinstance(left, str):
        _check_format(left, left.count("%"), right)
    elif operator == "+" and isinstance(left, (str, list, tuple)):
        budget.charge((1 if isinstance(left, str) else ELEMENT) * (len(left) + len(right)))
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise Refused(f"it makes a number of more than {MAX_INT_BITS} bits")
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                budget.charge((1 if isinstance(items, str) else ELEMENT) * len(items) * max(0, times))


def _check_format(layout: str, n_fields: int, values: Any) -> None:
    """Charge for a formatting whose every field may print all of the values."""
    if _WIDE_FORMAT.search(layout):
        raise Refused("it formats a number too wide")
    current.get().charge(len(layout) + n_fields * len(text(values)))


class _Generation(Extension):
    """transformers' `{% generation %}`: marks what the assistant says; for rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012  # the name and form Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> str:
    # Taking the context also keeps Jinja from evaluating constant expressions while it compiles, outside any budget.
    return text(value)


@functools.cache
def environment() -> jinja2.Environment:
    """The one environment, shared by all templates (it holds no state of theirs)."""
    env = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_finalize,
        cache_size=0,
    )
    builtin: dict[str, Any] = dict(env.filters)
    env.filters = {name: builtin[name] for name in filters.SHALLOW}
    env.filters |= {name: filters.guarded(builtin[name]) for name in filters.WALKED}
    env.filters |= {
        "indent": filters.indent,
        "join": filters.join,
        "miro_concatenated": filters.concatenated,
        "miro_measured": measured,
        "miro_rounds": _Rounds,
        "miro_sized": sized,
        "replace": filters.replace,
        "string": text,
        "tojson": filters.tojson,
    }
    env.tests = {name: filters.guarded(test) for name, test in dict[str, Any](env.tests).items()}
    env.globals = {name: env.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
    env.globals |= {"raise_exception": filters.raise_exception, "strftime_now": filters.strftime_now}
    return env
