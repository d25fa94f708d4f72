"""The Jinja dialect of chat templates, its errors and its bounds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from models import chat_template
from models.chat_template import ChatTemplate, parse_templates
from models.errors import ModelLoadError
from models.text_model import TemplateError

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    template = ChatTemplate({"default": source}, variables={"bos_token": "<s>", "eos_token": None})
    return template.render(USER if messages is None else messages, kwargs=kwargs)


def test_a_usual_template() -> None:
    source = (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if loop.first and message['role'] != 'system' %}\n"
        "[system]\n"
        "    {% endif %}\n"
        "<{{ message.role }}>{{ message['content'] | trim }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes"}]
    assert render(source, messages) == "<s>\n[system]\n<user>Hi\n<assistant>Yes\n<assistant>"
    template = ChatTemplate({"default": source})
    assert not template.render(messages, kwargs={}, add_generation_prompt=False).endswith(
        "<assistant>"
    )


def test_tojson_keeps_characters_and_escapes_no_html() -> None:
    assert render("{{ x | tojson }}", x={"a": "<é&'日>"}) == '{"a": "<é&\'日>"}'
    assert render("{{ x | tojson(indent=2) }}", x={"b": 1}) == '{\n  "b": 1\n}'
    assert (
        render("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x={"b": 1, "a": [1, 2]})
        == '{"a":[1,2],"b":1}'
    )
    assert render("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'


def test_loop_controls_and_generation_tags() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}"
        "{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    )
    assert render(source) == "023"


def test_loop_variables_survive_the_step_count() -> None:
    source = (
        "{% for i in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}"
        "{{ ';' if not loop.last }}{% endfor %}"
        "{% for i in nothing %}x{% else %} none{% endfor %}"
        "{% for k, v in {'a': 1}.items() %} {{ k }}{{ v }}{% endfor %}"
        "{% for n in [[1, [2]]] recursive %} {{ n[0] }}{{ loop(n[1:]) if n[1:] }}{% endfor %}"
    )
    assert render(source) == "1/3;2/3;3/3 none a1 1 2"


def test_strftime_now_reads_the_injected_clock() -> None:
    template = ChatTemplate(
        {"default": "{{ strftime_now('%d %b %Y') }}"},
        now=lambda: datetime(2024, 7, 26, tzinfo=UTC),
    )
    assert template.render(USER, kwargs={}) == "26 Jul 2024"


def test_a_template_that_raises_rejects_the_request_with_its_message() -> None:
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('roles must\nalternate') }}")
    assert (
        str(caught.value) == "the model's chat template rejected this request: roles must alternate"
    )


def test_a_long_rejection_is_cut() -> None:
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('x' * 5000) }}")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 // 0 }}",
        "{{ [] | first | length + none }}",
        "{{ messages[0].content | tojson(indent=1000) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ unknown_function() }}",
    ],
)
def test_any_other_failure_is_a_template_error_on_one_line(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert str(caught.value).startswith("the model's chat template ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000000 }}",
        "{{ 100000000000 * [1] }}",
        "{{ 10 ** 10000000000 }}",
        "{{ '%100000000000d' % 1 }}",
        "{{ '%*d' % (100000000000, 1) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10000000000) %}{% endfor %}",
    ],
)
def test_template_bombs_end_in_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    assert len(render("{% for a in range(100) %}0123456789{% endfor %}")) == 1000
    with pytest.raises(TemplateError, match="too long"):
        render("{% for a in range(101) %}0123456789{% endfor %}")


def test_the_step_budget_starts_anew_with_every_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_LOOP_STEPS", 10)
    template = ChatTemplate({"default": "{% for a in range(10) %}{{ a }}{% endfor %}"})
    assert [template.render(USER, kwargs={}) for _ in range(3)] == ["0123456789"] * 3


def test_neither_messages_nor_the_prompt_switch_can_be_replaced() -> None:
    source = "{{ messages[0].content }} {{ add_generation_prompt }} {{ bos_token }} {{ x }}"
    out = render(source, messages=USER, add_generation_prompt=True, bos_token="B", x=1)
    assert out == "Hi True B 1"
    template = ChatTemplate({"default": source})
    kwargs = {"messages": [], "add_generation_prompt": True, "x": 2}
    rendered = template.render(USER, kwargs=kwargs, add_generation_prompt=False)
    assert rendered == "Hi False  2"


def test_named_templates_choose_by_tools() -> None:
    named = parse_templates(
        [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "with {{ tools | length }}"},
        ]
    )
    template = ChatTemplate(named)
    assert template.supports_tools
    assert template.render(USER, kwargs={}) == "plain"
    assert template.render(USER, kwargs={"tools": [{}]}) == "with 1"


def test_supports_tools_looks_at_the_variables_read() -> None:
    conditional = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"
    assert ChatTemplate({"default": conditional}).supports_tools
    assert not ChatTemplate({"default": "{# tools #}{{ messages[0].content }}"}).supports_tools


def test_a_template_without_tools_sees_none() -> None:
    assert render("{{ tools is none }} {{ 'x' if tools }}") == "True "


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a", "{% nonsense %}", "{{ x | nofilter }}"])
def test_a_broken_template_is_a_load_error_on_one_line(source: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        ChatTemplate({"default": source})
    assert "chat template is not valid" in str(caught.value)
    assert "\n" not in str(caught.value)
