# ruff: noqa: E501
"""Templates that would never end, or fill the memory, are stopped after a number of steps, the same on each machine."""

import asyncio
import threading

import pytest

from holdfast.router.chat import Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.text.chat import FEW_STEPS, TemplateBudgetError, render_chat
from holdfast.router.text.tokenizer_registry import FEW_PARTS, TokenizerRegistry
from holdfast.worker.errors import InvalidRequestError
from tests import loops
from tests.fakes import byte_tokenizer

USER = [{"role": "user", "content": "Hi"}]
STEPS = 60_000

LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x%s }}"
LONG = "{% set x = 'abcdefgh' * 100000 %}"

ENDLESS = {
    "nested loops": LOOPS + "{{ a }}" + ENDS,
    "loops that write nothing": LOOPS + ENDS,
    "loops whose condition holds for nothing": "{% for a in range(9999) %}{% for b in range(9999) if b < 0 %}{% endfor %}{% endfor %}",
    "loops that write plain text": LOOPS + "x" * 500 + ENDS,
    "a loop inside of itself": "{% for a in [[1]] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 22 + "x" + "{% endcall %}" * 22,
    "text that doubles": DOUBLED % ("'ab'", "ns.x + ns.x", ""),
    "text that doubles by a tilde": DOUBLED % ("'ab'", "ns.x ~ ns.x", ""),
    "text that doubles by format": DOUBLED % ("'ab'", "'%s%s' % (ns.x, ns.x)", ""),
    "text that doubles by join": DOUBLED % ("'ab'", "[ns.x, ns.x] | join", ""),
    "text that doubles by a method": DOUBLED % ("'ab'", "''.join([ns.x, ns.x])", ""),
    "lists that double": DOUBLED % ("[1]", "ns.x + ns.x", "|length"),
    "lists of themselves": DOUBLED % ("[1]", "[ns.x, ns.x]", "|length"),
    "lists of themselves as JSON": DOUBLED % ("[1]", "[ns.x, ns.x]", "|tojson"),
    "mappings of themselves": DOUBLED % ("[1]", "{'a': ns.x, 'b': ns.x}", "|length"),
    "mappings of themselves by dict": DOUBLED % ("[1]", "dict(a=ns.x, b=ns.x)", "|length"),
    "namespaces of themselves": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = [namespace(a=ns.x, b=ns.x)] %}{% endfor %}{{ ns.x }}",
    "multiplied text": "{{ 'a' * 10000000000 }}",
    "multiplied lists": "{{ ([1] * 10000000000)|length }}",
    "powers": "{{ 10 ** 100000000 }}",
    "products": DOUBLED % ("9", "ns.x * ns.x", ""),
    "center": "{{ 'a'|center(10000000000) }}",
    "center, a method": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "tabs": "{{ '\t'.expandtabs(10000000000) }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "indent": "{{ 'a\nb'|indent(10000000000) }}",
    "JSON's indent": "{{ [1]|tojson(indent=10000000000) }}",
    "wide format": "{{ '%10000000000d' % 1 }}",
    "wide format of an argument": "{{ '%*d' % (10000000000, 1) }}",
    "wide format, a filter": "{{ '%10000000000d'|format(1) }}",
    "wide format, a method": "{{ '{:10000000000}'.format(1) }}",
    "wide format of an argument, a method": "{{ '{:{}}'.format(1, 10000000000) }}",
    "repeated format": LONG + "{{ ('%(a)s' * 100000) % {'a': x} }}",
    "repeated format, a method": LONG + "{{ ('{0}' * 100000).format(x) }}",
    "replace": LONG + "{{ x.replace('a', x) }}",
    "replace, a filter": LONG + "{{ x|replace('a', x) }}",
    "join": LONG + "{{ x.join(x) }}",
    "join, a filter": LONG + "{{ x|join(x) }}",
    "translate": LONG + "{{ x.translate({97: x}) }}",
    "batch": "{{ [1]|batch(10000000000, 0)|list|length }}",
    "slice": "{{ [1]|slice(10000000000)|list|length }}",
    "round": "{{ 5|round(-10000000000) }}",
    "random text": "{{ lipsum(n=10000000) }}",
    "comparisons": LONG + "{% set y = 'abcdefgh' * 100000 %}{% for a in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
    "searches": LONG + "{% for a in range(99999) %}{% if 'zz' in x %}{% endif %}{% endfor %}",
    "tests": LONG + "{% for a in range(99999) %}{% if 'zz' is in x %}{% endif %}{% endfor %}",
    "slices": LONG + "{% for a in range(99999) %}{% set z = x[1:] %}{% endfor %}",
    "filters of filters": "{% for a in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}",
    "sums of lists": "{{ (range(99999)|map('list')|list)|sum(start=[]) }}{{ ([[1]] * 99999)|sum(start=[])|length }}",
    "variables of the request": "{% for a in range(n) %}{% for b in range(n) %}{{ a }}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_not_end_is_stopped_before_it_fills_the_memory(name):
    with pytest.raises(InvalidRequestError, match="the model's chat template"):
        render_chat(ENDLESS[name], USER, template_kwargs={"n": 99999}, steps=STEPS)


def test_the_number_of_steps_is_that_of_the_template_alone():
    """To the step: a budget of one less is too little, every time."""
    template = "{% for message in messages %}{{ message.role|upper ~ ': ' ~ message.content.strip() }}{% endfor %}"

    def steps_of() -> int:
        return next(steps for steps in range(1000) if _renders(template, steps))

    assert steps_of() == steps_of()
    with pytest.raises(TemplateBudgetError, match=r"chat = .*cannot be rendered: it was stopped after 3 steps"):
        render_chat(template, USER, steps=3)


def _renders(template: str, steps: int) -> bool:
    try:
        return bool(render_chat(template, USER, steps=steps))
    except TemplateBudgetError:
        return False


PLAIN = {
    "{% for m in messages %}{{ m.content|trim|upper }}{% if not loop.last %}, {% endif %}{% endfor %}": "HI, HO, HI",
    "{{ messages|map(attribute='content')|join('-') }}": "Hi-Ho-Hi",
    "{{ messages[1:]|length }}{{ (messages|selectattr('role', 'equalto', 'user')|list)|length }}": "23",
    "{% set ns = namespace(found=[]) %}{% for m in messages[::-1] %}{% set ns.found = ns.found + [m.content] %}"
    "{% endfor %}{{ ns.found|tojson }}": '["Hi", "Ho", "Hi"]',
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {% endfor %}": "1/3 2/3 3/3 ",
    "{% macro f(x, y='z') %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) ~ f('a', y=2) }}": "<1z><a2>",
    "{{ '%s of %05.1f' % ('a', 2.5) }}|{{ '{:>4}'.format('x') }}|{{ 'a,b'.split(',')|last }}": "a of 002.5|   x|b",
    "{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ 7 % 4 }}{{ ('x', 1) }}{{ {'a': [1, none]} }}": "1024abab3('x', 1){'a': [1, None]}",
    "{{ [3, 1, 2]|sort|join }}{{ [1, 2]|sum }}{{ ['a']|first }}{{ ''|default('d', true) }}{{ 2.6|round|int }}": "1233ad3",
    "{% generation %}{{ 1 in [1, 2] }}{{ 'i' in 'Hi' }}{{ 1 < 2 <= 2 }}{% endgeneration %}": "TrueTrueTrue",
    "{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}{% for a in [] %}{% else %}e{% endfor %}": "a2b1e",
}


@pytest.mark.parametrize("template", PLAIN)
def test_what_ends_is_as_without_a_budget(template):
    chat = [{"role": "user", "content": text} for text in ("Hi", "Ho", "Hi")]
    assert render_chat(template, chat) == PLAIN[template]


def test_a_long_chat_has_as_many_steps_as_it_needs():
    chat = Chat(messages=tuple({"role": "user", "content": "word " * 4000} for _ in range(150)))
    template = "{% for m in messages %}" + "{{ (m.content|trim ~ '\n')|replace('x', 'y') }}" * 3 + "{% endfor %}"
    registry = TokenizerRegistry(lambda path: byte_tokenizer(path, template), 1000)

    async def rendered() -> str:
        await registry.load("m", "")
        return await registry.render("m", chat)

    assert loops.run(rendered()).count("word") == 3 * 150 * 4000


def test_a_short_chat_that_takes_long_is_rendered_off_the_loop(monkeypatch):
    template = "{% for a in range(30000) %}{{ where() }}{% endfor %}"
    threads: set[int] = set()
    from holdfast.router.text import chat

    monkeypatch.setitem(chat._environment().globals, "where", lambda: threads.add(threading.get_ident()) or "")
    registry = TokenizerRegistry(lambda path: byte_tokenizer(path, template), 1000)

    async def rendered() -> int:
        await registry.load("m", "")
        asking = asyncio.ensure_future(registry.render("m", Chat(messages=tuple(USER))))
        num_turns = 0
        while not asking.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert await asking == ""
        return num_turns

    assert loops.run(rendered()) > 1
    assert len(threads) == 2, "it was begun on the loop, and done anew on another thread"
    assert FEW_STEPS < 30000


FEW_MESSAGES = FEW_PARTS // 3
"""A message counts for itself, its role and its content."""

LARGE = {
    "many messages": Chat(messages=tuple(USER) * (FEW_MESSAGES + 1)),
    "many documents": Chat(messages=USER, template_kwargs={"documents": [{"a": 1}] * FEW_PARTS}),
    "many tools": Chat(messages=USER, tools=[{"type": "function"}] * FEW_PARTS),
    "deep values": Chat(messages=USER, template_kwargs={"a": {"b": {"c": list(range(FEW_PARTS))}}}),
    "a long text": Chat(messages=[{"role": "user", "content": "x" * 10**6}]),
    "a long name": Chat(messages=USER, template_kwargs={"x" * 10**6: 1}),
}


@pytest.mark.parametrize("case", ["", *LARGE])
def test_a_large_chat_is_rendered_off_the_loop(case, monkeypatch):
    threads: set[int] = {threading.get_ident()}
    from holdfast.router.text import chat

    monkeypatch.setitem(chat._environment().globals, "where", lambda: threads.add(threading.get_ident()) or "")
    registry = TokenizerRegistry(lambda path: byte_tokenizer(path, "{{ where() }}"), 10**5)

    async def rendered() -> str:
        await registry.load("m", "")
        threads.clear()
        threads.add(threading.get_ident())
        return await registry.render("m", LARGE.get(case) or Chat(messages=tuple(USER) * FEW_MESSAGES))

    assert loops.run(rendered()) == ""
    assert len(threads) == (2 if case else 1)


@pytest.mark.parametrize("case", ["", *LARGE])
def test_a_large_chat_is_checked_off_the_loop(case):
    registry = TokenizerRegistry(lambda path: byte_tokenizer(path, "x"), 10**5)
    threads: list[int] = []

    async def checked() -> None:
        chat = LARGE.get(case) or Chat(messages=tuple(USER) * FEW_MESSAGES)
        await registry.check(chat, lambda limits: threads.append(threading.get_ident()), LimitsConfig())

    loops.run(checked())
    assert [thread != threading.get_ident() for thread in threads] == [bool(case)]
