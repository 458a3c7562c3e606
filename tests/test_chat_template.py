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


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_template_that_fails_is_one_line(source, reason):
    with pytest.raises(ValueError, match=f"the chat template refused the messages: .*({reason})") as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "hi"}], [{"role": 3}], None])
def test_messages_of_another_form_are_refused(messages):
    with pytest.raises(ValueError, match="messages"):
        render("x", messages)
