"""A Jinja environment for templates nobody vouches for: no access to Python, and bounded work.

Jinja's sandbox keeps a template away from Python's internals; it does not stop one that loops for ever or builds a
terabyte. So a parsed template is rewritten to pay into its `Budget` wherever it loops, compares, concatenates, slices
or prints; calls and operators pay in the environment's hooks; and what one operation could multiply ("x" * 10**9) is
checked before it is done. Otherwise rendering follows transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import object_type_repr
from jinja2.visitor import NodeTransformer

from miro_cy.text import filters
from miro_cy.text.budget import STEP, Budget, OutputTooLong, Refused, current, measured, sized, spread, text
from miro_cy.text.operations import (
    check_call,
    check_format,
    check_operator,
    check_replace,
    mapping,
    namespace,
    offered,
)  # fmt: skip

#: A template's names, operators and texts; real ones have some thousands. Python compiles this many in about a second.
MAX_TOKENS = 16 * 1024
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
        for pair in node.items:  # keys are hashed
            pair.key = _through("miro_measured", pair.key)
        return _through("miro_sized", node) if len(node.items) > _SMALL_LITERAL else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        # Tuples can be hashed, which visits all they hold; so they are paid for when made.
        return _through("miro_measured", node) if node.ctx == "load" else node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._spread(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._spread(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._spread(node)

    def _spread(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _through("miro_spread", node.dyn_args)
        return node

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


class _Undefined(jinja2.Undefined):
    """Jinja's, but its error does not print a key that is no text or number."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        name = self._undefined_name
        if self._undefined_hint or isinstance(name, (str, int)):
            return super()._undefined_message
        return f"{object_type_repr(self._undefined_obj)} has no such element of type {type(name).__name__}"


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Guards().visit(source), name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return offered(obj, attr) and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        current.get().walk(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        current.get().charge(STEP)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        layout: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(layout, layout.count("{"), [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        current.get().charge(_CALL)
        check_call(obj, args, kwargs)
        if isinstance(obj, LoopContext):
            args = tuple(map(_Rounds, args))
        owner = obj.__self__ if isinstance(obj, (BuiltinMethodType, MethodType)) else None
        if isinstance(owner, str):
            if obj.__name__ == "replace":
                check_replace(owner, *args)
            elif obj.__name__ == "join":
                return filters.joined(args[0] if args else (), owner)
        return sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return measured(result) if isinstance(result, tuple) else result


class _Generation(Extension):
    """transformers' `{% generation %}`: marks what the assistant says; for rendering it is its body.

    Also counts the template's tokens.
    """

    tags = {"generation"}  # noqa: RUF012  # the name and form Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count == MAX_TOKENS:
                raise Refused(f"it has more than {MAX_TOKENS} tokens")
            yield token


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
        undefined=_Undefined,
        cache_size=0,
    )
    builtin: dict[str, Any] = dict(env.filters)
    env.filters = {name: builtin[name] for name in filters.SHALLOW}
    env.filters |= {name: filters.textual(builtin[name]) for name in filters.TEXTUAL}
    env.filters |= {name: filters.walking(builtin[name]) for name in filters.WALKED}
    env.filters |= {
        "batch": filters.walking(filters.batch),
        "float": filters.real,
        "format": filters.guarded(filters.formatted),
        "indent": filters.indent,
        "int": filters.integer,
        "join": filters.join,
        "miro_concatenated": filters.concatenated,
        "miro_measured": measured,
        "miro_rounds": _Rounds,
        "miro_sized": sized,
        "miro_spread": spread,
        "replace": filters.replace,
        "round": filters.guarded(filters.rounded),
        "string": text,
        "sum": filters.walking(filters.total),
        "tojson": filters.tojson,
        "trim": filters.trim,
    }
    tests: dict[str, Any] = dict(env.tests)
    env.tests = {name: filters.guarded(test) for name, test in tests.items()}
    env.tests |= {name: filters.textual(tests[name]) for name in ("lower", "upper")}
    env.tests |= {name: filters.numeric(tests[name]) for name in ("divisibleby", "even", "odd")}
    env.globals = {name: env.globals[name] for name in ("range", "cycler", "joiner")}
    env.globals |= {"dict": mapping, "namespace": namespace}
    env.globals |= {"raise_exception": filters.raise_exception, "strftime_now": filters.strftime_now}
    return env
