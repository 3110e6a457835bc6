"""Chat templates: environment, limits, tolerance, continuation, engines, content format."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from smg.models.prompt import PromptError
from smg.tokenizer_pool.content_format import OPENAI, STRING, content_format, parse_template
from smg.tokenizer_pool.environment import ChatEnvironment, RenderLimits
from smg.tokenizer_pool.template import ChatTemplate, TemplateInput, parse_arguments
from smg.vocab.load import TokenizerLoadError

USER = {"role": "user", "content": "Hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    """The text, required to be the same from both engine settings."""
    special = fields.pop("special", {})
    texts = [
        ChatTemplate(source, special, fast=fast).render(TemplateInput(messages or [USER], **fields)).text
        for fast in (False, True)
    ]
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("true", "True"),
        ("none", "None"),
        ("{'a': [none, 'x'], 'b': (1, 2)}", "{'a': [None, 'x'], 'b': (1, 2)}"),
        ("1e20", "1e+20"),
        ("0.00001", "1e-05"),
        ("2 ** 3", "8"),
        ("'x=%s' % 3", "x=3"),
        ("'a-b-c'.rsplit('-', 1)", "['a-b', 'c']"),
        ("'a-b'.partition('-')", "('a', '-', 'b')"),
        ("'prefix'.removeprefix('pre')", "fix"),
        ("'abc'[::-1]", "cba"),
        ("{'b': 1, 'a': [1.0, 'é', '<&\\u2028>']} | tojson", '{"b": 1, "a": [1.0, "é", "<&\u2028>"]}'),
        ("[1e-7, 1e22, 1.0] | tojson", "[1e-07, 1e+22, 1.0]"),
        ("'é' | tojson(true)", '"\\u00e9"'),
        ("{'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true)", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{'a': 1} | tojson(separators=(',', ':'))", '{"a":1}'),
        ("missing", ""),
        ("messages[0].missing", ""),
        ("messages[0].items() | list", "[('role', 'user'), ('content', 'Hi')]"),
        ("namespace(name='a' if true else '').name", "a"),
        ("dict(a=1).a", "1"),
        ("'a b' | wordcount", "2"),
        ("tools", "None"),
        ("documents", "None"),
        ("joiner is defined and cycler is defined", "True"),
        ("bos_token is defined", "False"),
    ],
)
def test_values_print_as_in_python(expression: str, expected: str) -> None:
    assert render("{{ " + expression + " }}") == expected


def test_blocks() -> None:
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc\n") == "a\n  b\nc"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
                  "{{ i }}{% endfor %}") == "013"  # fmt: skip
    assert render("{% generation %}x{% set y = 1 %}{% endgeneration %}{{ y is defined }}") == "xFalse"
    assert render("{{ bos_token }}{{ eos_token }}", special={"bos_token": "<s>"}) == "<s>"
    assert (
        render("{% macro m(x) %}[{{ x }}]{% endmacro %}{% for m2 in messages %}{{ m(m2.role) }}{% endfor %}")
        == "[user]"
    )
    assert (
        render("{% set ns = namespace(n=0) %}{% for c in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "3"
    )


def test_the_clock_is_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", {}, now=lambda: datetime(2024, 2, 29, 8))
    assert template.render(TemplateInput([USER])).text == "29 February 2024"


def test_reserved_names_cannot_be_replaced() -> None:
    kwargs = {"messages": [], "tools": 1, "add_generation_prompt": False, "bos_token": "x", "strftime_now": 1, "z": "z"}
    text = render("{{ messages | length }}{{ tools }}{{ add_generation_prompt }}{{ bos_token }}{{ z }}", kwargs=kwargs)
    assert text == "1NoneTruez"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ messages[0].pop('role') }}",
        "{% for x in range(100001) %}{% endfor %}",
        "{{ undefined_name.attribute }}",
        "{{ undefined_name | tojson }}",
        "{% for x in none %}{% endfor %}",
        "{{ none | length }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x.y }}",
        "{% include 'x' %}",
        "{{ '{0.__class__.__mro__}'.format('')[0].x }}",
    ],
)
def test_what_templates_may_not_do(source: str) -> None:
    with pytest.raises(PromptError) as caught:
        render(source)
    assert caught.value.code == "process_messages_failed"
    assert caught.value.message.startswith("Failed to apply chat template: Failed to render template: ")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% do x %}", "{% unknown %}"])
def test_syntax_errors_fail_the_load(source: str) -> None:
    with pytest.raises(TokenizerLoadError, match="cannot be compiled"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% for x in range(90000) %}{{ messages[0].content * 30 }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 99999 }}",
        "{{ '%9999999d' % 1 }}",
    ],
)
def test_a_render_is_bounded(source: str) -> None:
    limits = RenderLimits(seconds=5, steps=20_000, characters=100_000)
    with pytest.raises(PromptError):
        ChatTemplate(source, {}, limits=limits, fast=False).render(TemplateInput([USER]))
    with pytest.raises(PromptError):
        ChatTemplate(source, {}, limits=limits).render(TemplateInput([USER]))


def test_a_render_is_bounded_in_time() -> None:
    template = ChatTemplate("{% for a in range(99999) %}{% endfor %}", {}, limits=RenderLimits(seconds=-1), fast=False)
    with pytest.raises(PromptError, match="takes too long"):
        template.render(TemplateInput([USER]))


def test_refusals_are_final_and_named() -> None:
    source = "{% if messages[0].content is none %}{{ raise_exception('No ' ~ messages[0].role) }}{% endif %}"
    with pytest.raises(PromptError, match=r"Failed to render template: No assistant$"):
        render(source, [{"role": "assistant", "content": None}])


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant(content: Any, *arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call(value) for value in arguments]}


ARGUMENTS = "{{ messages[0].tool_calls[0].function.arguments %s }}"


def test_arguments_are_objects_unless_a_template_wants_text() -> None:
    messages, texts = parse_arguments([assistant("", '{"a":  1}')])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    fields = {"argument_texts": texts}
    assert render(ARGUMENTS % ".a", messages, **fields) == "1"
    assert render(ARGUMENTS % "+ '!'", messages, **fields) == '{"a":  1}!'
    assert render(ARGUMENTS % "+ '!'", messages) == '{"a": 1}!'


def test_arguments_that_are_no_objects() -> None:
    for text, expected in (
        ("", "{}"),
        (" ", "{}"),
        ("[1, 2]", "[1, 2]"),
        ("{broken", "{broken"),
        ("[" * 100_000, None),
    ):
        messages, texts = parse_arguments([assistant("", text)])
        found = render(ARGUMENTS % "", messages, argument_texts=texts)
        assert found == (text if expected is None else expected)
    items = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    messages, texts = parse_arguments([assistant("", "{broken")])
    assert render(items, messages, argument_texts=texts) == "arguments={broken"


def test_the_order_of_attempts() -> None:
    null = [assistant(None, {"a": 1})]
    assert render("{{ messages[0].content + 'x' }}", null) == "x"
    both = "{{ messages[0].content + messages[0].tool_calls[0].function.arguments }}"
    assert render(both, null) == '{"a": 1}'
    prefers_text = "{% if messages[0].content is none %}" + ARGUMENTS % "+ 'x'" + "{% endif %}"
    assert render(prefers_text, null) == '{"a": 1}x'
    assert render("{% for t in tools %}{% endfor %}ok") == "ok"


def test_the_first_error_is_reported() -> None:
    with pytest.raises(PromptError, match="'missing' is undefined"):
        render("{{ missing.first + (tools | length) }}", [assistant(None, {})])


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def continued(source: str, content: Any, **more: Any) -> tuple[str, bool]:
    messages = [USER, {"role": "assistant", "content": content, **more}]
    rendered = ChatTemplate(source, {}).render(TemplateInput(messages, continue_final_message=True))
    return rendered.text, rendered.continued


def test_continuation_in_place() -> None:
    assert continued(CHAT, "Once upon  ") == ("<user>Hi</><assistant>Once upon  ", True)
    assert continued(CHAT.replace("m.content", "m.content | trim"), "Once upon  ")[0].endswith("<assistant>Once upon")
    assert continued(CHAT, "say CONTINUE_FINAL_MESSAGE_TAG ")[0].endswith("say CONTINUE_FINAL_MESSAGE_TAG ")
    assert continued(CHAT, "")[0] == "<user>Hi</><assistant>"
    assert continued(CHAT, "x", reasoning_content="r") == ("<user>Hi</><assistant>x", True)


def test_continuation_of_parts() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}</>{% endfor %}"
    )
    assert continued(source, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])[0].endswith(
        "<assistant>a|b"
    )


def test_continuation_behind_the_generation_prompt() -> None:
    drops = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}")
    assert continued(drops, "x") == ("<user>Hi</><assistant>x", False)
    assert continued(CHAT, None) == ("<user>Hi</><assistant>", False)
    raising = CHAT.replace("<{{", "{% if loop.last and m.role != 'user' %}{{ raise_exception('no') }}{% endif %}<{{")
    assert continued(raising, "x") == ("<user>Hi</><assistant>x", False)
    with pytest.raises(PromptError, match="reasoning_content"):
        continued(drops, "x", reasoning_content="r")


def test_continuation_needs_an_assistant_message() -> None:
    rendered = ChatTemplate(CHAT, {}).render(TemplateInput([USER], continue_final_message=True))
    assert (rendered.text, rendered.continued) == ("<user>Hi</><assistant>", False)


def test_the_fast_engine_never_changes_a_text() -> None:
    """Values that the engines print differently are left to Jinja2, whatever was rendered before."""
    template = ChatTemplate("{% for m in messages %}{{ m.x }} {{ m.x | string }},{% endfor %}", {})
    reference = ChatTemplate(template.source, {}, fast=False)
    for value in ("text", 1, 2.5, True, None, 1e-7, 1e22, 2**70, 1.0, [1, "a"], {"k": "v"}, "again", 1e-7, 2**70, []):
        given = TemplateInput([{"role": "user", "content": "", "x": value}])
        assert template.render(given).text == reference.render(given).text
    assert template.engine == "minijinja"


def test_the_fast_engine_is_used() -> None:
    template = ChatTemplate(CHAT, {})
    assert template.render(TemplateInput([USER])).engine == "minijinja"
    assert template.render(TemplateInput([USER], fast=False)).engine == "jinja2"
    assert ChatTemplate("{{ 'a'.zfill(3) }}", {}).engine == "jinja2"
    assert ChatTemplate(CHAT, {}, fast=False).engine == "jinja2"


MACRO = "{%% macro f(%s) %%}{%% for p in c %%}{%% endfor %%}{%% endmacro %%}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", STRING),
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", OPENAI),
        ("{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}", OPENAI),
        ("{% set ms = messages[1:] %}{% for m in ms %}{% for p in m.content[:2] %}{% endfor %}{% endfor %}", OPENAI),
        ("{% for x in other %}{% for p in x.content %}{% endfor %}{% endfor %}", STRING),
        ("{% for m in messages %}{% if m.content is string %}{{ m.content[0].text }}{% endif %}{% endfor %}", STRING),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}", OPENAI),
        (MACRO % "c" + "{% for m in messages %}{{ f(m.content) }}{% endfor %}", OPENAI),
        (MACRO % "a, c" + "{% for m in messages %}{{ f(1, c=m.content) }}{% endfor %}", OPENAI),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ f('x') }}", STRING),
        ("{% for p in content %}{% endfor %}", OPENAI),
        ("{{ m.content | length }}", STRING),
        ("{% if", STRING),
    ],
)  # fmt: skip
def test_content_format(source: str, expected: str) -> None:
    assert content_format(parse_template(source, ChatEnvironment())) == expected


def test_numbers_beyond_64_bits_survive() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}]
    assert json.loads(render("{{ tools | tojson }}", tools=tools)) == tools


@pytest.mark.parametrize(
    "value", [{"a": 2**70}, {"a": 1.0}, {"a": 1}, {"a": -0.0}, {"a": 1e22}, {"a": None}, {"a": float("nan")}, {"é": {}}]
)
def test_objects_print_the_same_the_second_time(value: dict[str, Any]) -> None:
    for _ in range(2):
        assert render("{{ messages[0].x | tojson }}", [{"role": "user", "x": value}]) == json.dumps(
            value, ensure_ascii=False
        )
