"""A message that the model goes on with: the prompt ends after what the template shows of it.

transformers does the same, and is compared with. It finds out by one space whether a template trims: a test says where
that goes wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_on_disk import smollm2
from transformers.utils.chat_template_utils import render_jinja_template

from jpaged.chat_template import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": " assistant: <|im_end|> end\n"}


class Case(NamedTuple):
    """header: what stands before the last message. shown: what the template makes of its text."""

    source: str
    header: str
    shown: Callable[[str], str] = str


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN_3 = """{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {{- content.lstrip('\n') }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
IM_USER = f"<|im_start|>user\n{USER['content']}<|im_end|>\n"
CASES = {
    "chatml": Case(CHATML, f"{IM_USER}<|im_start|>assistant\n"),
    "llama 3": Case(
        LLAMA_3,
        "<s><|start_header_id|>user<|end_header_id|>\n\nassistant: <|im_end|> end<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        str.strip,
    ),
    "llama 2": Case(LLAMA_2, "<s>[INST] assistant: <|im_end|> end [/INST] ", str.strip),
    "mistral": Case(MISTRAL, "<s>[INST]  assistant: <|im_end|> end\n [/INST]"),
    "gemma": Case(
        GEMMA,
        "<s><start_of_turn>user\nassistant: <|im_end|> end<end_of_turn>\n<start_of_turn>model\n",
        str.strip,
    ),
    "qwen 3": Case(
        QWEN_3, f"{IM_USER}<|im_start|>assistant\n<think>\n\n</think>\n\n", lambda text: text.lstrip("\n")
    ),
    "line breaks at the end": Case("{{ messages[-1].content.rstrip('\n') }}\n\n!", "", lambda text: text.rstrip("\n")),
    "shown twice": Case("{{ messages[-1].content }}|{{ messages[-1].content }}|", "{0}|"),
    "shown twice and trimmed": Case(
        "{{ messages[-1].content | trim }}|{{ messages[-1].content | trim }}", "{1}|", str.strip
    ),
}
FRAGMENTS = "<| im end <|im_end|> \n \t assistant user < > </ s /INST [ Some text".split(" ") + [" ", "  ", "\n", "x"]
CONTENTS = st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), st.text(max_size=8))


def ours(source: str, messages: list, **options) -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render(messages, continue_final_message=True, **options)


def theirs(source: str, messages: list) -> str:
    (text,), _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, **SPECIAL_TOKENS
    )
    return text


def conversation(content) -> list[dict]:
    return [USER, {"role": "assistant", "content": content}]


@pytest.mark.parametrize("name", CASES)
@given(content=CONTENTS)
def test_prompt_ends_after_what_the_template_shows_of_the_message(name, content):
    source, header, shown = CASES[name]
    assert ours(source, conversation(content)) == header.format(content, shown(content)) + shown(content)


@pytest.mark.parametrize("name", [name for name in CASES if "twice" not in name])  # transformers leaves its mark in
@given(content=CONTENTS)
def test_prompt_is_that_of_transformers(name, content):
    source = CASES[name].source
    is_trimmed = content != content.rstrip()
    if name == "llama 2" and is_trimmed:
        return  # a space follows the message, so transformers takes it for one that is not trimmed
    if name in ("llama 3", "gemma", "line breaks at the end") and not content.strip():
        return  # transformers goes on to trim the header
    if name == "line breaks at the end" and is_trimmed:
        return  # transformers takes away spaces, which the template keeps
    assert ours(source, conversation(content)) == theirs(source, conversation(content))


@pytest.mark.parametrize("content", ["<", "end", "|", "im", "<|im_end|>", "\n", "", "x \n", " "])
def test_default_models_own_text_is_never_taken_for_the_message(content):
    messages = conversation(content)
    text = smollm2().apply_chat_template(messages, continue_final_message=True)
    assert text == theirs(smollm2()._chat_template.source, messages)
    assert text.endswith(f"{IM_USER}<|im_start|>assistant\n{content}")


def test_transformers_trims_the_header_of_a_blank_message_and_keeps_what_llama_2_trims():
    """The faults that the comparison leaves out: once they are mended there, it should not."""
    assert theirs(LLAMA_3, conversation("\n")).endswith("assistant<|end_header_id|>")
    assert ours(LLAMA_3, conversation("\n")).endswith("assistant<|end_header_id|>\n\n")
    assert theirs(LLAMA_2, conversation("x \n")).endswith(" [/INST] x \n")
    assert ours(LLAMA_2, conversation("x \n")).endswith(" [/INST] x")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ messages[-1].content | upper }}!", "SAY: "),
        ("{{ messages[-1] | tojson }}", '{"role": "assistant", "content": "say: '),
        ("{{ messages[-1].content | replace('say', 'tell') }}!", "tell: "),
        ("{% if messages[-1].content %}[{{ messages[-1].content | trim }}]{% endif %}", "[say:"),
        ("{{ strftime_now('%f') }}".join("ab") + "{{ messages[-1].content | trim }}", None),
    ],
)
def test_what_a_template_makes_of_the_text_is_what_is_continued(source, shown):
    text = ours(source, conversation("say: "))
    assert text == shown if shown else text.endswith("say:")


def test_blank_message_that_a_template_leaves_out_or_refuses_is_continued_from_its_header():
    assert ours("{% for m in messages if m.content %}[{{ m.content }}]{% endfor %}", conversation(""))[-2:] == "]["
    refusing = "{% if not messages[-1].content.strip() %}{{ raise_exception('blank') }}{% endif %}"
    assert ours(refusing + "[{{ messages[-1].content }}]", conversation(" ")) == "[ "


PARTS = "{% for m in messages %}[{% for part in m.content %}{{ part.text | trim }}{% endfor %}]{% endfor %}"


@pytest.mark.parametrize("last", ["<", "]", "x \n", "[]"])
def test_last_text_of_content_in_parts_is_continued(last):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": last}, {"type": "image", "url": "u"}]
    messages = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": parts}]
    assert ours(PARTS, messages) == theirs(PARTS, messages) == f"[one][one{last.strip()}"
    assert parts[1] == {"type": "text", "text": last}  # the caller's own stay as they are
    assert ours("{{ messages[-1].content | join }}", conversation(["a", "b"])) == "ab"


@pytest.mark.parametrize("content", [None, 5, [], [{"type": "image"}], {"text": "x"}])
def test_message_without_text_cannot_be_continued(content):
    with pytest.raises(ValueError, match="continue_final_message needs text in the last message, got") as caught:
        ours("{{ messages[-1].content }}", conversation(content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["x", "{{ messages[0].content }}", "{{ messages[-1].content[:3] }}"])
def test_template_that_does_not_show_the_end_of_the_message_is_one_line(source):
    with pytest.raises(ValueError, match="^continue_final_message: the chat template does not show the last message"):
        ours(source, conversation("The answer"))


def test_a_generation_prompt_is_left_out_unless_it_is_asked_for():
    source = "{{ messages[-1].content }}{% if add_generation_prompt %}[a]{% endif %}"
    assert ours(source, conversation("x")) == ours(source, conversation("x"), add_generation_prompt=False) == "x"
    with pytest.raises(ValueError, match="cannot both be true"):
        ours(source, conversation("x"), add_generation_prompt=True)
    with pytest.raises(ValueError, match="must be true or false, got 'content'"):
        ChatTemplate(source, {}).render(conversation("x"), continue_final_message="content")
