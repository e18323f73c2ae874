"""Chat templates: rendered as transformers does, and harmless whatever the model file holds."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from miro_cy.errors import BadField, MiroError, Unsupported
from miro_cy.text import Tokenizer, budget
from miro_cy.text.messages import MAX_MESSAGES
from miro_cy.text.template import MAX_PROMPT_CHARS, MAX_TEMPLATE_CHARS, ChatTemplate

Maker = Callable[..., Tokenizer]
USER = [{"role": "user", "content": "hello"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **kwargs)


def test_render(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "system", "content": "Be brief."}, *USER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.has_template


def test_no_template(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer(template=None)
    assert tokenizer.supported
    with pytest.raises(Unsupported, match="no chat template"):
        tokenizer.render(USER)


SAME_AS_TRANSFORMERS: list[tuple[str, str]] = [
    # trim_blocks and lstrip_blocks
    ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
    ("{{ bos_token }}{{ eos_token }}|{{ unk_token }}", "<s></s>|"),
    ("{{ tools is none }} {{ documents }}", "True None"),
    ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
     "{% endfor %}", "02"),
    ("{% generation %}x{{ 1 }}{% endgeneration %}", "x1"),
    ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
    ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
    ("{% for a, b in [(1, 2), (3, 4)] %}{{ a ~ b }}{% endfor %}", "1234"),
    ("{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}", "x1"),
    ("{% for m in [] %}x{% else %}empty{% endfor %}", "empty"),
    ("{% macro f(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1) }}{{ f(3, y=4) | upper }}", "[12][34]"),
    ("{{ messages[-1]['content'].strip().replace('l', 'L')[1:3] }}", "eL"),
    ("{{ ', '.join(['a', 'b']) }}|{{ ['a', 1] | join('-') }}|{{ messages | join(',', attribute='role') }}",
     "a, b|a-1|user"),
    ("{{ 'a' + 'b' * 3 ~ 2 ** 3 ~ 7 % 4 }} {{ '%s-%02d' % ('x', 5) }}", "abbb83 x-05"),
    ("{{ '{}-{:>3}-{a}'.format(1, 'b', a='c') }}", "1-  b-c"),
    ("{{ 'x\ny' | indent(2) }}|{{ 'x\ny' | indent(2, first=true) }}", "x\n  y|  x\n  y"),
    ("{{ messages | map(attribute='role') | list }}", "['user']"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ("{{ [3, 1, 2] | sort | first }}{{ 'a' in 'abc' }}{{ 1 < 2 <= 2 }}{{ not ('x' is string) }}", "1TrueTrueFalse"),
    ("{{ (messages[0].name is defined) ~ (undefined_thing | default('d')) }}", "Falsed"),
    ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}q{% endfilter %}", "a1Q"),
    ("<b>{{ '<&>' }}</b>", "<b><&></b>"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), SAME_AS_TRANSFORMERS)
def test_language(source: str, expected: str) -> None:
    assert render(source) == expected


def test_date() -> None:
    before = datetime.now().strftime("%Y")
    assert render("{{ strftime_now('%Y') }}") in (before, datetime.now().strftime("%Y"))


def test_state_does_not_leak_between_renderings() -> None:
    template = ChatTemplate("{% set ns = namespace(x=0) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}", {})
    assert [template.render(USER) for _ in range(3)] == ["1", "1", "1"]


def test_raise_exception_names_the_reason() -> None:
    with pytest.raises(BadField, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


def test_an_error_over_the_messages_is_theirs() -> None:
    with pytest.raises(BadField, match="cannot render these messages") as caught:
        render("{{ messages[0].tool_calls[0].function.name }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        None, "hello", {}, [], 5, [None], ["x"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": 1, "content": "x"}], [{"role": "user", "content": None}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "extra": 1}], [{"role": "user", "content": "\ud800"}],
        USER * (MAX_MESSAGES + 1),
    ],
)  # fmt: skip
def test_malformed_messages(messages: object) -> None:
    with pytest.raises(BadField) as caught:
        render("x", messages)
    assert str(caught.value.field).startswith("messages")


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ 'x' | no_such_filter }}", "{{", "{% include 'x' %}{% nonsense %}", "(" * 10, "{{ " + "(" * 5000],
)
def test_broken_templates(source: str) -> None:
    if source == "(" * 10:
        assert render(source) == source
        return
    with pytest.raises(Unsupported, match=r"not valid|does not offer"):
        render(source)


def test_template_too_long() -> None:
    with pytest.raises(Unsupported, match=f"the limit is {MAX_TEMPLATE_CHARS}"):
        render("x" * (MAX_TEMPLATE_CHARS + 1))


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ ('{0.__class__}'.format)(1) }}",
    "{{ dict.mro() }}",
    "{{ ''['__class__'] }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_promise_a_model_file_is_data_template_escapes(source: str) -> None:
    try:
        text = render(source)
    except (BadField, Unsupported):
        return
    # Jinja prints an attribute it hides as nothing.
    assert text == ""


LOOP = "{% for a in range(100000) %}"
NEST = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}"


def nest(start: str, grow: str, use: str) -> str:
    return NEST.replace("START", start).replace("GROW", grow) + use


BOMBS = {
    "nested loops": LOOP * 4 + "{% endfor %}" * 4,
    "loops that print": LOOP * 2 + "x{{ a }}" + "{% endfor %}" * 2,
    "text in a macro": "{% macro f() %}" + LOOP + LOOP + "x" * 1000 + "{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "exponential recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "recursive loop": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "range": "{{ range(10**9) | list | length }}",
    "string times": "{{ 'x' * 10000000000 }}",
    "times string": "{{ 10000000000 * 'x' }}",
    "list times": "{{ ([1] * 10000000000) | length }}",
    "power": "{{ 9 ** 999999999 }}",
    "negative power": "{{ 9 ** (-9999999) }}",
    "product": nest("9", "ns.x * ns.x", "{{ ns.x }}"),
    "wide format": "{{ '%1000000000d' % 1 }}",
    "star format": "{{ '%*d' % (1000000000, 1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "format's nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format of one value often": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "percent of one value often": "{{ '%(a)s' * 100000 % {'a': 'x' * 100000} }}",
    "center filter": "{{ 'x' | center(1000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') | length }}",
    "bytes": "{{ 'x'.encode().center(1000000000) | length }}",
    "indent": "{{ 'x\ny' | indent(1000000000) }}",
    "json indent": "{{ [1] | tojson(indent=1000000000) }}",
    "replace method": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) | length }}",
    "replace filter": "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) | length }}",
    "replace nothing": "{{ ('x' * 1000000).replace('', 'y' * 1000000) | length }}",
    "join": "{{ ('x' * 10000).join('y' * 1000000) | length }}",
    "doubling by ~": nest("'x'", "ns.x ~ ns.x", "{{ ns.x | length }}"),
    "doubling by +": nest("'x'", "ns.x + ns.x", "{{ ns.x | length }}"),
    "doubling lists": nest("[1]", "ns.x + ns.x", "{{ ns.x | length }}"),
    "doubling by set": NEST.replace("START", "'x'").replace(
        "{% set ns.x = GROW %}", "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}"
    ),
    "printing a nest": nest("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "json of a nest": nest("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "dict nest": nest("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | string | length }}"),
    "view of a nest": nest("[1]", "[ns.x, ns.x]", "{{ {'a': ns.x}.values() }}"),
    "namespace of a nest": nest("[1]", "[ns.x, ns.x]", "{{ ns }}"),
    "percent of a nest": nest("[1]", "[ns.x, ns.x]", "{{ '%s' % [ns.x] }}"),
    "comparing nests": nest("[1]", "[ns.x, ns.x]", "{% set a = ns.x %}")
    + nest("[1]", "[ns.x, ns.x]", "{{ ns.x == a }}"),
    "testing nests": nest("[1]", "[ns.x, ns.x]", "{% set a = ns.x %}")
    + nest("[1]", "[ns.x, ns.x]", "{{ ns.x is eq a }}"),
    "counting nests": nest("[1]", "[ns.x, ns.x]", "{% set a = ns.x %}")
    + nest("[1]", "[ns.x, ns.x]", "{{ [ns.x].count(a) }}"),
    "sorting nests": nest("[1]", "[ns.x, ns.x]", "{% set a = ns.x %}")
    + nest("[1]", "[ns.x, ns.x]", "{{ [ns.x, a] | sort | length }}"),
    "hashing nests": nest("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} | length }}"),
    "slices kept": "{% set big = range(100000) | list %}{% set ns = namespace(x=[]) %}" + LOOP
    + "{% set ns.x = [ns.x, big[1:]] %}{% endfor %}",
    "long date": "{{ strftime_now('%Y' * 1000000) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_promise_a_model_file_is_data_template_bombs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A typed error, in bounded time and memory; with an eighth of the usual work, to be quick about it."""
    monkeypatch.setattr(budget, "MAX_WORK", budget.MAX_WORK // 8)
    tracemalloc.start()
    try:
        with pytest.raises((BadField, Unsupported)):
            render(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 128 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(60)
def test_work_and_time_are_both_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=f"more than {budget.MAX_WORK} units of work"):
        render(BOMBS["doubling by ~"])
    monkeypatch.setattr(budget, "MAX_WORK", 2**60)
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.2)
    with pytest.raises(Unsupported, match=r"longer than 0\.2 s"):
        render(BOMBS["nested loops"])


def test_bombs_are_not_evaluated_while_compiling() -> None:
    """Behind a condition that is false they do nothing at all."""
    for source in ("{{ 'x' * 10000000000 }}", "{{ 'x'.center(10000000000) }}", "{{ 9 ** 9 ** 9 }}", "{{ 'ab' ~ 'c' }}"):
        assert render("{% if false %}" + source + "{% endif %}done") == "done"


def test_long_conversations_are_within_the_budget(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x" * 300}] * MAX_MESSAGES
    assert tokenizer.render(messages).count("<|im_start|>") == MAX_MESSAGES + 1


def test_prompt_too_long(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadField, match=f"longer than {MAX_PROMPT_CHARS} characters"):
        tokenizer.render([{"role": "user", "content": "x" * MAX_PROMPT_CHARS}])


def test_templates_of_real_models(reference_data: Path) -> None:
    conversation = [*USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}]
    for path in sorted((reference_data / "templates").glob("*.jinja")):
        text = render(path.read_text(), conversation)
        assert all(message["content"] in text for message in conversation), path.name


def test_errors_are_one_line_and_short() -> None:
    with pytest.raises(MiroError) as caught:
        render("{{ raise_exception(messages[0].content * 10000) }}")
    assert len(json.dumps(caught.value.message)) < 500
