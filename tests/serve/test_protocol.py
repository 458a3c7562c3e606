"""What a body may be, and the one line that says why not. No server, no engine."""

import codecs
import json

import pytest

from jpaged.serve.errors import ApiError
from jpaged.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jpaged.serve.unsupported import CHAT, COMPLETION

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(body_class, body) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        body_class.parse(raw).sampling_params({}, max_tokens=16)
    error = caught.value
    assert error.status == 400
    assert "\n" not in error.message and len(error.message) <= 420
    assert "pydantic" not in error.message
    return error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} b', "trailing characters"),
        (b'{"prompt": "\xff"}', "invalid UTF-8"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "\\udc00x"}', "lone surrogate"),
        (b'{"prompt": ' + b"[" * 5000, "recursion limit"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_says_what_is_wrong(body, says):
    assert says in refusal(CompletionBody, body).message


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", "16", "max_tokens must be an integer, got '16'"),
        ("max_tokens", 1.5, "max_tokens must be an integer, got 1.5"),
        ("max_tokens", True, "max_tokens must be an integer, got True"),
        ("max_tokens", 0, "max_tokens must be at least 1, or 0 with prompt_logprobs, got 0"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", -1, "temperature must be in [0, 100], got -1.0"),
        ("temperature", float("nan"), "temperature must be a finite number, got nan"),
        ("temperature", float("inf"), "temperature must be a finite number, got inf"),
        ("top_p", 0, "top_p must be in (0, 1], got 0.0"),
        ("top_p", 1.1, "top_p must be in (0, 1], got 1.1"),
        ("min_p", 2, "min_p must be in [0, 1], got 2.0"),
        ("top_k", -2, "top_k must be -1 or 0 (off) or positive, got -2"),
        ("seed", 2**70, "seed must fit in 64 bits, got 1180591620717411303424"),
        ("logprobs", -1, "logprobs must not be negative, got -1"),
        ("logprobs", True, "logprobs must be an integer, got True"),
        ("stop", 5, "stop must be a string or a list, got 5"),
        ("stop", ["a", 5], "stop[1] must be a string, got 5"),
        ("stop", [""], "stop must hold non-empty strings, got ['']"),
        ("stop_token_ids", [1, "b"], "stop_token_ids[1] must be an integer, got 'b'"),
        ("presence_penalty", 2.1, "presence_penalty must be in [-2, 2], got 2.1"),
        ("presence_penalty", False, "presence_penalty must be a number, got False"),
        ("frequency_penalty", -3, "frequency_penalty must be in [-2, 2], got -3.0"),
        ("repetition_penalty", 0, "repetition_penalty must be in [0.01, 100], got 0.0"),
        ("repetition_penalty", float("nan"), "repetition_penalty must be a finite number, got nan"),
        ("logit_bias", [1], "logit_bias must be an object, got [1]"),
        ("logit_bias", {"a": 1}, "logit_bias must have token ids as keys, got 'a'"),
        ("logit_bias", {"-1": 1}, "logit_bias must have token ids as keys, got '-1'"),
        ("logit_bias", {"5": 100.5}, "logit_bias must hold numbers in [-100, 100], got 100.5 for token 5"),
        ("logit_bias", {"5": float("nan")}, "logit_bias must hold numbers in [-100, 100], got nan for token 5"),
        ("logit_bias", {"5": 1, "05": 1}, "logit_bias names token 5 twice"),
        ("logit_bias", {str(i): 1 for i in range(301)}, "logit_bias takes at most 300 tokens, got 301"),
        ("allowed_token_ids", [], "allowed_token_ids must not be empty"),
        ("allowed_token_ids", [5, -1], "allowed_token_ids must hold token ids, got -1"),
        ("allowed_token_ids", [True], "allowed_token_ids[0] must be an integer, got True"),
        ("bad_words", "a", "bad_words must be a list, got 'a'"),
        ("bad_words", ["a", ""], "bad_words must hold non-empty strings, got ['a', '']"),
        ("bad_words", ["a"] * 129, "bad_words takes at most 128 strings, got 129"),
        ("prompt_logprobs", -1, "prompt_logprobs must not be negative, got -1"),
        ("prompt_logprobs", True, "prompt_logprobs must be an integer, got True"),
        ("echo", 1, "echo must be a boolean, got 1"),
        ("stream", "yes", "stream must be a boolean, got 'yes'"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream to be true"),
        ("request_id", "a\nb", "request_id must be ASCII without spaces, got 'a\\nb'"),
        ("request_id", "a ", "request_id must be ASCII without spaces, got 'a '"),
        ("request_id", "é", "request_id must be ASCII without spaces, got 'é'"),
        ("request_id", "a" * 129, "request_id must be a string of at most 128 characters"),
        ("stop", ["a" * 2000, ""], "stop must hold non-empty strings"),
        ("frobnicate", 1, "frobnicate is not a known field"),
    ],
)
def test_a_wrong_value_is_named_with_its_field_and_limit(field, value, says):
    error = refusal(CompletionBody, {"prompt": "a", field: value})
    assert says in error.message
    assert error.param == field


@pytest.mark.parametrize("prompt", [1, True, {}, [], [1, "a"], [[1], []], [[]], [True], [["a"]], [1.5], [[1.0], [True]], None])
def test_a_prompt_of_no_known_shape_is_refused(prompt):
    assert refusal(CompletionBody, {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([1.0], [[1]])],
)
def test_a_prompt_has_four_shapes(prompt, choices):
    assert CompletionBody.parse(json.dumps({"prompt": prompt}).encode()).prompts() == choices


@pytest.mark.parametrize(
    ("body_class", "start", "table"),
    [(CompletionBody, {"prompt": "a"}, COMPLETION), (ChatBody, {"messages": MESSAGES}, CHAT)],
)
def test_an_unsupported_field_is_refused_by_name_unless_it_asks_for_nothing(body_class, start, table):
    for name, neutral in table.items():
        assert name not in body_class.model_fields
        for value in (None, *neutral):
            body_class.parse(json.dumps(start | {name: value}).encode())
        error = refusal(body_class, start | {name: "something else"})
        assert error.param == name and error.message.startswith(f"{name} is not supported")


def test_false_is_not_a_neutral_zero():
    assert refusal(CompletionBody, {"prompt": "a", "priority": False}).param == "priority"
    assert refusal(CompletionBody, {"prompt": "a", "n": True}).param == "n"


def test_labels_pass_because_they_change_nothing():
    CompletionBody.parse(json.dumps({"prompt": "a", "user": "me", "metadata": {"a": "b"}}).encode())


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (1, "messages[0] must be an object, got 1"),
        ({"content": "a"}, "messages[0].role is required"),
        ({"role": "boss", "content": "a"}, "messages[0].role must be 'system', 'developer', 'user' or 'assistant'"),
        ({"role": "user"}, "messages[0].content is required"),
        ({"role": "user", "content": 5}, "messages[0].content must be a string or a list, got 5"),
        ({"role": "user", "content": [5]}, "messages[0].content[0] must be an object, got 5"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0].type 'image_url' is not supported",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text must be a string, got None"),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls is not supported"),
        ({"role": "user", "content": "a", "colour": "red"}, "messages[0].colour is not a known field"),
    ],
)
def test_a_message_that_cannot_be_rendered_whole_is_refused_by_its_path(message, says):
    with pytest.raises(ApiError) as caught:
        ChatBody.parse(json.dumps({"messages": [message]}).encode()).messages_for_template()
    assert says in caught.value.message


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatBody.parse(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert body.messages_for_template() == [{"role": "user", "content": "a\nb"}]


def test_an_answer_of_the_openai_client_can_be_sent_back():
    message = {"role": "assistant", "content": "a", "refusal": None, "annotations": None, "audio": None,
               "function_call": None, "tool_calls": None}  # fmt: skip
    ChatBody.parse(json.dumps({"messages": [message]}).encode()).messages_for_template()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be in [0, 20], got 21"),
        ({"logprobs": 5}, "logprobs must be a boolean, got 5"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens (4) and max_tokens (3) are one limit"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    ],
)
def test_chat_fields_are_checked(fields, says):
    with pytest.raises(ApiError) as caught:
        ChatBody.parse(json.dumps({"messages": MESSAGES} | fields).encode()).messages_for_template()
    assert says in caught.value.message


def test_the_request_beats_the_model_and_the_model_beats_openai():
    defaults = {"temperature": 0.2, "top_k": 7}
    body = CompletionBody.parse(b'{"prompt": "a", "temperature": 0.5, "top_p": null}')
    params = body.sampling_params(defaults, max_tokens=16)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 1.0, 16)


@pytest.mark.parametrize(
    ("body_class", "start"), [(CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": MESSAGES})]
)
def test_penalties_biases_and_bans_arrive_and_their_limits_are_allowed(body_class, start):
    fields = {
        "presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01,
        "logit_bias": {str(i): (-100, 100.0)[i % 2] for i in range(300)}, "allowed_token_ids": list(range(5000)),
        "bad_words": ["a b"] * 128,
    }  # fmt: skip
    params = body_class.parse(json.dumps(start | fields).encode()).sampling_params({}, max_tokens=16)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 2, 0.01)
    assert params.logit_bias == {i: (-100, 100)[i % 2] for i in range(300)}
    assert params.allowed_token_ids == tuple(range(5000)) and params.bad_words == ("a b",) * 128
    assert params.edits_logits
    neutral = start | {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "bad_words": [],
    }
    assert not body_class.parse(json.dumps(neutral).encode()).sampling_params({}, max_tokens=16).edits_logits


def test_prompt_logprobs_cannot_be_streamed():
    error = refusal(CompletionBody, {"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert (error.param, error.message) == ("prompt_logprobs", "prompt_logprobs is not supported with stream")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"echo": True}, (16, None, None)),
        ({"echo": True, "logprobs": 3}, (16, 3, 3)),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, (16, 3, 1)),
        ({"echo": True, "logprobs": 3, "max_tokens": 0}, (0, 3, 3)),
        ({"echo": True, "max_tokens": 0}, (0, None, 0)),
        ({"echo": False, "logprobs": 3}, (16, 3, None)),
    ],
)
def test_an_echo_asks_for_the_prompts_logprobs_where_it_asks_for_any(fields, expected):
    params = CompletionBody.parse(json.dumps({"prompt": "a"} | fields).encode()).sampling_params({}, max_tokens=16)
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == expected


@pytest.mark.parametrize(("body_class", "start"), [(CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": MESSAGES})])
def test_a_whole_number_is_an_integer_however_it_is_written(body_class, start):
    """JSON has one kind of number, and some clients write all of theirs with a point."""
    whole = {"max_tokens": 9, "n": 2, "top_k": 3, "min_tokens": 1, "seed": 7, "prompt_logprobs": 1, "priority": 2}
    lists = {"stop_token_ids": [3, 4], "allowed_token_ids": [3, 4, 5]}
    pointed = {name: float(value) for name, value in whole.items()}
    pointed |= {name: list(map(float, ids)) for name, ids in lists.items()}
    params = body_class.parse(json.dumps(start | pointed).encode()).sampling_params({}, max_tokens=16)
    for name, value in (whole | {name: tuple(ids) for name, ids in lists.items()}).items():
        got = getattr(params, name)
        assert got == value and not isinstance(got, float), name
    error = refusal(body_class, start | {"max_tokens": 2.5})
    assert (error.message, error.param) == ("max_tokens must be an integer, got 2.5", "max_tokens")
    assert DetokenizeBody.parse(b'{"tokens": [1.0, 2]}').tokens == [1, 2]


@pytest.mark.parametrize("body_class", [CompletionBody, ChatBody, TokenizeBody])
def test_a_body_may_begin_with_a_byte_order_mark(body_class):
    body = {"messages": MESSAGES} if body_class is ChatBody else {"prompt": "a"}
    assert body_class.parse(codecs.BOM_UTF8 + json.dumps(body).encode()) == body_class.parse(json.dumps(body).encode())
    with pytest.raises(ApiError, match="not valid JSON"):
        body_class.parse(codecs.BOM_UTF8 * 2 + b"{}")


def test_an_assistants_message_without_content_is_an_empty_one_and_others_are_refused():
    said = {"role": "assistant"}
    for message in (said, said | {"content": None}, said | {"content": None, "tool_calls": []}, said | {"content": ""}):
        body = ChatBody.parse(json.dumps({"messages": [*MESSAGES, message]}).encode())
        assert body.messages_for_template()[-1] == {"role": "assistant", "content": ""}


def test_max_completion_tokens_is_max_tokens():
    body = ChatBody.parse(json.dumps({"messages": MESSAGES, "max_completion_tokens": 5}).encode())
    assert body.sampling_params({}, max_tokens=None).max_tokens == 5


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": MESSAGES}])
def test_tokenize_takes_a_prompt_or_messages(fields):
    with pytest.raises(ApiError, match="either prompt or messages"):
        TokenizeBody.parse(json.dumps(fields).encode())
