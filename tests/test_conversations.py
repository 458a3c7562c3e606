"""Conversations in the forms that people have them."""

from dataclasses import dataclass

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from jpaged.conversations import read_conversations

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}
FORMS = 'must be a list of messages, each {"role": ..., "content": ...}'


@dataclass
class Turn:
    role: str
    content: str
    name: str | None = None


@pytest.mark.parametrize(
    "given, found",
    [
        (USER, [[USER]]),
        ([USER, ANSWER], [[USER, ANSWER]]),
        ((USER, ANSWER), [[USER, ANSWER]]),
        (iter([USER, ANSWER]), [[USER, ANSWER]]),
        ([[USER], (USER, ANSWER)], [[USER], [USER, ANSWER]]),
        ((turns for turns in [[USER], [ANSWER]]), [[USER], [ANSWER]]),
        (np.array([USER, ANSWER], object), [[USER, ANSWER]]),
        ([USER, ChatCompletionMessage(role="assistant", content="yes")], [[USER, ANSWER]]),
        ([Turn("user", "hi")], [[USER]]),
        ([], []),
        ([{"role": "assistant", "content": None}], [[{"role": "assistant", "content": None}]]),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [[USER]]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [[{"role": "user", "content": "a\nb"}]],
        ),
    ],
)
def test_conversations_are_read_in_the_forms_that_people_have(given, found):
    assert read_conversations(given) == found


def test_parts_that_are_no_text_are_left_to_the_template():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}]}
    assert read_conversations([message]) == [[message]]


@pytest.mark.parametrize(
    "given, says",
    [
        (None, f"messages {FORMS}, or a list of such lists, got None"),
        ("hi", f"messages {FORMS}, or a list of such lists, got 'hi'"),
        (["hi"], f"conversation 0 {FORMS}, got 'hi'"),
        ([USER, "hi"], f"messages {FORMS}, got 'hi' at 1"),
        ([[USER], None], f"conversation 1 {FORMS}, got None"),
        ([[USER], [USER, 5]], f"conversation 1 {FORMS}, got 5 at 1"),
        ([[USER], []], f"conversation 1 {FORMS}, got []"),
    ],
)
def test_what_is_no_conversation_is_named_and_the_form_is_told(given, says):
    with pytest.raises(ValueError) as caught:
        read_conversations(given)
    assert str(caught.value) == says
