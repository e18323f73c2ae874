"""Templates that made Python do endless work in one step, where no budget could stop it; each ends in a typed error.

They run in a process of their own: one that hangs would hold the interpreter's lock, and no timeout would end it.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from miro_cy.errors import BadField, Unsupported
from miro_cy.text import budget
from miro_cy.text.template import ChatTemplate

#: Far more than any of them takes, and far less than for ever.
DEADLINE = 60.0
MEMORY = 4 * 2**30
USER = [{"role": "user", "content": "hello"}]


def serve(pipe: Connection) -> None:
    """Answers each template with what became of it; impatiently, as all that counts is that it can be stopped."""
    budget.MAX_SECONDS = 2.0
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        source = pipe.recv()
        try:
            pipe.send(("text", ChatTemplate(source, {}).render(USER)))
        except (BadField, Unsupported) as error:
            pipe.send((type(error).__name__, error.message))


class Renderer:
    """Renders templates in a process that is ended when one takes too long."""

    def __init__(self) -> None:
        self._process: Any = None

    def __call__(self, source: str) -> tuple[str, str]:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send(source)
        try:
            if not self._pipe.poll(DEADLINE):
                raise AssertionError(f"it was still rendering after {DEADLINE:g} s")
            answer: tuple[str, str] = self._pipe.recv()
        except (AssertionError, EOFError):
            self.close()
            raise
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def nest(start: str, grow: str, times: int = 60) -> str:
    """ns.a and ns.b: equal, not the same, and small in memory."""
    grown = "".join(f"{{% set ns.{n} = {grow.replace('X', 'ns.' + n)} %}}" for n in "ab")
    return f"{{% set ns = namespace(a={start}, b={start}) %}}{{% for i in range({times}) %}}{grown}{{% endfor %}}"


LISTS = nest("[1]", "[X, X]")
#: Tuples made where no tuple is written.
TUPLES = (
    "{% set ns = namespace() %}{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}"
    "{% else %}{% set ns.a = varargs %}{% endif %}{% endmacro %}{{ f(60) }}"
)
#: 30 million elements in one filter's hands, of one text.
LONG = "{% set long = 'ba' * 15000000 %}"
NUMBERS = "{% set a = ('f' * 8000000) | int(0, 16) %}{% set b = ('f' * 4000000) | int(0, 16) %}"
#: Numbers with the same hash.
COLLIDING = "{% set m = 2 ** 61 - 1 %}{% set same = range(0, m * 90000, m) %}"

HOLES = {
    "loop.changed": LISTS + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "loop.changed by name": LISTS + "{% for x in [ns.a, ns.b] %}{{ loop['changed'](x) }}{% endfor %}",
    "isdisjoint": LISTS + "{{ {'k': ns.a}.items().isdisjoint({'k': ns.b}.items()) }}",
    "views": LISTS + "{{ {'k': ns.a}.items() == {'k': ns.b}.items() }}",
    "subtracted views": TUPLES + "{{ {'k': ns.a}.items() - {'k': ns.a}.items() }}",
    "key of nothing": LISTS + "{{ ns.a[ns.b].foo }}",
    "key of a call": LISTS + "{{ ns.a[ns.b]() }}",
    "raise_exception": LISTS + "{{ raise_exception(ns.a) }}",
    "raise_exception of an object": LISTS + "{{ raise_exception(ns) }}",
    "index": LISTS + "{{ [1].index(ns.a) }}",
    "index of an object": LISTS + "{{ [1].index(ns) }}",
    "tuple's index": LISTS + "{{ (1, 2).index(ns.a) }}",
    "range's index": LISTS + "{{ range(3).index(ns.a) }}",
    "call of an object": LISTS + "{% set ns.unsafe_callable = true %}{{ ns() }}",
    "upper of an object": LISTS + "{{ ns | upper }}",
    "escape of an object": LISTS + "{{ ns | escape }}",
    "safe of an object": LISTS + "{{ ns | safe }}",
    "trim of an object": LISTS + "{{ ns | trim }}",
    "test of an object": LISTS + "{{ ns is lower }}",
    "map of objects": LISTS + "{{ [ns] | map('upper') | list }}",
    "format of an object": LISTS + "{{ '%s' | format(ns) }}",
    "in what a filter yields": LISTS + "{{ ns.a in ([ns.b] | select) }}",
    "sort of what a filter yields": LISTS + "{{ [ns.a, ns.b] | select | sort }}",
    "max of what a filter yields": LISTS + "{{ [ns.a, ns.b] | select | max }}",
    "long texts that a filter yields": "{% set x = 'A' * 9000000 %}"
    "{{ ([{'k': x}] * 9000) | map(attribute='k') | sort }}",
    "hash of varargs": TUPLES + "{{ {ns.a: 1} }}",
    "get by varargs": TUPLES + "{{ {}.get(ns.a) }}",
    "item by varargs": TUPLES + "{{ {}[ns.a] }}",
    "unique varargs": TUPLES + "{{ [ns.a] | unique | list }}",
    "hash of a deep tuple": "{% set ns = namespace(x=1) %}{% for i in range(30000) %}"
    "{% set ns.x = {'a': ns.x}.items() | first %}{% endfor %}{{ {ns.x: 1} | length }}",
    "a // b": NUMBERS + "{{ a // b > 0 }}",
    "a % b": NUMBERS + "{{ a % b > 0 }}",
    "a - b": "{% set a = ('f' * 8000000) | int(0, 16) %}" + "{% set a = a - 1 %}" * 9,
    "division of written numbers": "{{ 0x" + "f" * 3500 + " // 3 > 0 }}",
    "remainder of written numbers": "{{ 0x" + "f" * 3500 + " % 3 }}",
    "difference of written numbers": "{{ 0x" + "f" * 3500 + " - 1 > 0 }}",
    "is divisibleby": NUMBERS + "{{ a is divisibleby(b) }}",
    "text that is even": "{{ '%999999999d' is even }}",
    "text that is divisible": "{{ '%999999999d' is divisibleby(1) }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "round up": "{{ 5 | round(1000000000, 'ceil') }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "sum": "{{ ([[1] * 3000] * 3000) | sum(start=[]) | length }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "format of many": "{{ '%(a)999d' * 3000000 % {'a': 1} }}",
    "rfind": "{{ ('a' * 4000000).rfind('ab' + 'a' * 2000000) }}",
    "rindex": "{{ ('a' * 4000000).rindex('ab' + 'a' * 2000000) }}",
    "rsplit": "{{ ('a' * 4000000).rsplit('ab' + 'a' * 2000000) }}",
    "rsplit by name": "{{ ('a' * 4000000).rsplit(sep='ab' + 'a' * 2000000) }}",
    "rpartition": "{{ ('a' * 4000000).rpartition('ab' + 'a' * 2000000) }}",
    "safe rfind": "{{ (('a' * 4000000) | safe).rfind('ab' + 'a' * 2000000) }}",
    "strip": "{{ ('\u0561' * 4000000).strip('b' * 4000000 + '\u0561') }}",
    "lstrip": "{{ ('\u0561' * 4000000).lstrip('b' * 4000000 + '\u0561') }}",
    "rstrip": "{{ ('\u0561' * 4000000).rstrip('b' * 4000000 + '\u0561') }}",
    "trim": "{{ ('\u0561' * 4000000) | trim('b' * 4000000 + '\u0561') }}",
    "striptags": "{{ (('<' * 4000000) | safe).striptags() }}",
    "sort of a long text": LONG + "{{ long | sort | length }}",
    "max of a long text": LONG + "{{ long | max }}",
    "arguments of a long text": LONG + "{{ cycler(*long) }}",
    "long attribute": "{{ range(90000) | sort(attribute='x,' * 20000) | length }}",
    "filters of filters": "{% set ns = namespace(x=range(90000)) %}{% for i in range(200) %}"
    "{% set ns.x = ns.x | select %}{% endfor %}{{ ns.x | list | length }}",
    "same hashes": COLLIDING + "{{ dict.fromkeys(same) | length }}",
    "same hashes in a dict": COLLIDING + "{{ dict(same | batch(2)) | length }}",
    "same hashes in a namespace": COLLIDING + "{{ namespace(same | batch(2)) }}",
    "indented JSON of a nest": "{% set ns = namespace(x=range(90000) | list) %}{% for i in range(200) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=64) }}",
    "indented lines": "{{ ('\\r' * 9000000) | indent('x' * 64, blank=true) }}",
    "recursive loop": "{% for x in range(2) recursive %}{{ loop(range(90000)) if loop.depth < 3 }}{% endfor %}",
}  # fmt: skip


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", HOLES)
def test_promise_a_model_file_is_data_no_step_of_a_template_is_endless(renderer: Renderer, name: str) -> None:
    kind, message = renderer(HOLES[name])
    assert kind in ("BadField", "Unsupported"), message
    assert "MemoryError" not in message


SLOW_TO_COMPILE = {
    "comparisons": "{{ a" + "<a" * 32000 + " }}",
    "joins": "{{ a" + "~a" * 32000 + " }}",
    "prints": "{{x}}" * 13000,
    "lists": "{{ [" + "a," * 32000 + "] }}",
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", SLOW_TO_COMPILE)
def test_promise_a_model_file_is_data_templates_of_too_many_parts(renderer: Renderer, name: str) -> None:
    assert renderer(SLOW_TO_COMPILE[name]) == (
        "Unsupported", "the model's chat template was refused: it has more than 16384 tokens"
    )  # fmt: skip


SAME = [
    ("{{ [1, 2.5] | sum }}|{{ messages | sum(attribute='n', start=3) if false }}|{{ [] | sum }}", "3.5||0"),
    ("{{ [[1], [2]] | sum(start=[]) }}", "[1, 2]"),
    ("{{ 42.55 | round }}|{{ 42.55 | round(1, 'floor') }}|{{ 7 | round }}", "43.0|42.5|7"),
    ("{{ range(5) | batch(2, 'x') | list }}", "[[0, 1], [2, 3], [4, 'x']]"),
    ("{{ '%s, %02d' | format('a', 7) }}|{{ '%(x)s' | format(x=1) }}", "a, 07|1"),
    ("{{ '12' | int + '0x1f' | int(0, 16) }}|{{ '1.5' | float }}|{{ 'x' | int(7) }}", "43|1.5|7"),
    ("{{ 4 is even }}{{ 3 is odd }}{{ 6 is divisibleby(3) }}{{ 'a' is lower }}", "TrueTrueTrueTrue"),
    ("{{ 7 // 2 }} {{ 7 % 4 }} {{ 7 / 2 }} {{ 7 - 2 }} {{ -7 // 2.0 }}", "3 3 3.5 5 -4.0"),
    ("{{ '  x ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ none | trim }}", "x|a|None"),
    ("{{ 'a-b-c'.rsplit('-', 1) }}{{ 'abab'.rfind('ab') }}{{ 'xax'.strip('x') }}", "['a-b', 'c']2a"),
    ("{{ 'truthy' if [] | select else 'falsy' }}{{ [3, 1] | select | sort }}", "truthy[1, 3]"),
    ("{{ dict(a=1, b=2).items() | list }}{{ dict([('x', 1)]) }}", "[('a', 1), ('b', 2)]{'x': 1}"),
    ("{{ namespace({'q': 5}).q }}{{ namespace(q=6, r=7).r }}", "57"),
    ("{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }}{% endfor %}", "TrueaFalsebTruea"),
    ("{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "123"),
    ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{% set j = joiner() %}{{ j() }}{{ j() }}", "ab, "),
    ("{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(*[1]) %}x{% endcall %}{{ m.name }}", "1xm"),
    ("{% block b %}x{% endblock %}{{ self.b() }}", "xx"),
    ("{{ {'a': [1, {'b': none}]} | tojson(indent=1) }}", '{\n "a": [\n  1,\n  {\n   "b": null\n  }\n ]\n}'),
    ("{{ [1, 2].index(2) }}{{ [1, 1].count(1) }}{{ {'a': 1}.get('b', 2) }}", "122"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), SAME)
def test_what_is_paid_for_does_what_jinja_does(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render(USER) == expected
    from jinja2 import Environment

    if "0x1f" not in source:
        environment = Environment()
        environment.policies["json.dumps_kwargs"] = {}
        assert environment.from_string(source).render(messages=USER).replace("&#34;", '"') == expected


def test_an_unknown_key_is_named_if_short() -> None:
    for source, name in (("{{ [1][7].x }}", "no element 7"), ("{{ {}['k'].x }}", "no attribute 'k'"),
                         ("{{ [1][[2]].x }}", "no such element of type list")):  # fmt: skip
        with pytest.raises(BadField, match=name):
            ChatTemplate(source, {}).render(USER)


@pytest.mark.parametrize("method", ["center", "zfill", "expandtabs", "translate", "encode"])
def test_a_method_left_out_is_named(method: str) -> None:
    with pytest.raises(Unsupported, match=method):
        ChatTemplate("{{ 'x'." + method + "(9) }}", {}).render(USER)
