"""Chat templates: what Hugging Face's environment offers, in a sandbox, with errors of one line."""

import datetime

import pytest

from jpaged.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **kwargs):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **kwargs)


def test_template_sees_messages_special_tokens_and_extra_arguments():
    source = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m.content }}{% endfor %}{{ extra }}"
    source += "{{ tools is none }}"
    assert render(source, extra="!") == "<s>user:hi!True"
    assert render("{% if add_generation_prompt %}yes{% endif %}", add_generation_prompt=False) == ""


def test_whitespace_loop_controls_and_json_are_as_in_hugging_face():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert render("{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.date.today().year + i) for i in (-1, 0, 1)}


def test_what_the_template_has_to_say_of_the_messages_is_said_in_one_line():
    with pytest.raises(ValueError, match="^the chat template refused the messages: roles must alternate$"):
        render("{{ raise_exception('roles must\n alternate') }}")


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("{{ nothing.at_all }}", 1, "'nothing' is undefined"),
        ("a\nb\n{{ messages[0].content + 1 }}", 3, "can only concatenate str"),
        ("{% macro add(x) %}\n{{ x + 1 }}\n{% endmacro %}\n\n{{ add('a') }}", 2, "can only concatenate str"),
        ("{{ 1 / 0 }}", 1, "division by zero"),
        ("\n{{ ''.__class__.__mro__ }}", 2, "unsafe"),
        ("{{ messages.append(1) }}", 1, "not safely callable|unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", 1, "Range too big"),
    ],
)
def test_template_that_fails_is_one_line_with_the_line_of_the_template(source, line, reason):
    said = f"^the chat template failed on the messages at line {line}: .*({reason})"
    with pytest.raises(ValueError, match=said) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("a\nb{% if %}", "broken at line 2: Expected an expression, got 'end of statement block'"),
        ("{% for m in messages %}\n\n{{ m }}", "broken at line 3: Unexpected end of template. "),
        ("\n{{ messages | shout }}", "broken at line 2: No filter named 'shout'."),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "broken: maximum recursion depth exceeded"),
        (5, "broken: it is no text but int"),
    ],
)
def test_template_that_does_not_compile_is_known_before_any_messages_come(source, fault):
    template = ChatTemplate(source, {})
    assert template.fault.startswith(fault) and "\n" not in template.fault
    with pytest.raises(ValueError, match="^the chat template is broken"):
        template.render(USER)
    assert ChatTemplate("{{ messages }}", {}).fault is None


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "hi"}], [{"role": 3}], None])
def test_messages_of_another_form_are_refused(messages):
    with pytest.raises(ValueError, match="messages"):
        render("x", messages)
