"""The whole path: real HTTP, a real engine, a tiny random model."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from http_server import events, http_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.metrics import EngineMetrics
from jpaged.serve.protocol import ChatBody, CompletionBody

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(engine):
    with http_server(lambda: engine) as url:
        yield url


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def complete(client, prompt="hello", **fields) -> dict:
    response = client.post("/v1/completions", json=GREEDY | {"prompt": prompt} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def test_streamed_and_whole_answers_are_the_same_tokens_and_text(client):
    for path, ask in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        whole = client.post(path, json=GREEDY | ask | {"max_tokens": 24}).json()["choices"][0]
        stream = client.post(path, json=GREEDY | ask | {"max_tokens": 24, "stream": True}).text
        chunks = [json.loads(chunk)["choices"][0] for chunk in events(stream)[:-1]]
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["token_ids"]
        assert len(whole["token_ids"]) == 24
        text = "".join(chunk["text"] if "text" in chunk else chunk["delta"]["content"] for chunk in chunks)
        assert text == (whole["text"] if "text" in whole else whole["message"]["content"])
        assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_the_answer_to_a_continued_message_is_what_follows_it(client):
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<"
    body = GREEDY | {"messages": [*MESSAGES, {"role": "assistant", "content": "<"}], "continue_final_message": True}
    chat = client.post("/v1/chat/completions", json=body | {"max_tokens": 9}).json()
    same = complete(client, prompt, max_tokens=9)
    assert chat["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
    assert chat["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert chat["choices"][0]["message"]["content"] == same["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_are_the_samples_of_each_prompt_whole_and_streamed(client, path):
    asks = {"/v1/completions": {"prompt": ["one", "three three"]}, "/v1/chat/completions": {"messages": MESSAGES}}
    num_prompts = len(asks[path].get("prompt", "x"))
    body = GREEDY | asks[path] | {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 9, "return_token_ids": True}
    whole = client.post(path, json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * num_prompts))
    assert whole["usage"]["completion_tokens"] == 18 * num_prompts
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [json.loads(chunk) for chunk in events(client.post(path, json=body | options).text)[:-1]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert [token for chunk in own for token in chunk.get("token_ids", [])] == choice["token_ids"]
        text = "".join(chunk["text"] if "text" in chunk else chunk["delta"]["content"] for chunk in own)
        assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == ["length"]
    if path == "/v1/chat/completions":
        assert [c["choices"][0]["delta"].get("role") for c in chunks[:3]] == ["assistant", "assistant", None]


def test_the_best_of_two_is_one_of_them(client):
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 9, "return_token_ids": True}
    both = complete(client, n=2, **body)["choices"]
    answer = complete(client, best_of=2, **body)
    (best,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 18
    assert best["index"] == 0 and best["token_ids"] in [choice["token_ids"] for choice in both]


@pytest.mark.parametrize("stream", [False, True])
def test_beams_come_as_choices_best_first(client, engine, stream):
    body = {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "max_tokens": 6, "return_token_ids": True}
    ask = {"model": "tiny", "prompt": "hello", "ignore_eos": True} | body
    if stream:
        text = client.post("/v1/completions", json=ask | {"stream": True}).text
        choices = [json.loads(chunk)["choices"][0] for chunk in events(text)[:-1]]
    else:
        choices = client.post("/v1/completions", json=ask).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [len(choice["token_ids"]) for choice in choices] == [6, 6]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    refused = client.post("/v1/completions", json=ask | {"temperature": 0.5}).json()["error"]
    assert refused["message"] == "temperature must be 0 with use_beam_search, got 0.5"


def test_the_prompts_of_a_list_are_answered_as_if_alone(client):
    prompts = ["one", "two two", "three three three"]
    together = complete(client, prompts, max_tokens=8)
    alone = [complete(client, prompt, max_tokens=8) for prompt in prompts]
    assert [c["index"] for c in together["choices"]] == [0, 1, 2]
    assert [c["token_ids"] for c in together["choices"]] == [a["choices"][0]["token_ids"] for a in alone]
    assert together["usage"]["completion_tokens"] == 24


def test_a_seed_repeats_and_another_does_not(client):
    def sample(seed):
        return complete(client, temperature=2.0, seed=seed, max_tokens=16)["choices"][0]["token_ids"]

    assert sample(1) == sample(1) != sample(2)


def test_logprobs_are_those_of_the_greedy_choice(client):
    choice = complete(client, max_tokens=4, logprobs=2)["choices"][0]
    for chosen, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert chosen == max(top.values()) < 0
    body = GREEDY | {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    content = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 4
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)


def test_an_echo_is_the_prompt_with_its_logprobs_before_the_answer(client):
    plain = complete(client, "hello", max_tokens=3, logprobs=2)["choices"][0]
    echoed = complete(client, "hello", max_tokens=3, logprobs=2, echo=True)["choices"][0]
    assert echoed["text"] == "hello" + plain["text"] and echoed["token_ids"] == plain["token_ids"]
    columns, own = echoed["logprobs"], plain["logprobs"]
    assert columns["tokens"] == [*"hello", *own["tokens"]]
    assert columns["text_offset"] == [0, 1, 2, 3, 4, *(5 + offset for offset in own["text_offset"])]
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in columns["token_logprobs"][1:])
    assert columns["token_logprobs"][5:] == own["token_logprobs"] and columns["top_logprobs"][5:] == own["top_logprobs"]
    stream = client.post("/v1/completions", json=GREEDY | {"prompt": "hello", "max_tokens": 3, "logprobs": 2,
                                                            "echo": True, "stream": True}).text  # fmt: skip
    chunks = [json.loads(chunk)["choices"][0] for chunk in events(stream)[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == echoed["text"]
    for name, column in columns.items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == column


def test_an_echo_alone_is_the_prompt_and_nothing_more(client):
    answer = complete(client, [0, 5, 9], max_tokens=0, logprobs=1, echo=True)
    choice = answer["choices"][0]
    prompt = client.post("/detokenize", json={"tokens": [0, 5, 9]}).json()["prompt"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (prompt, [], "length")
    assert [len(column) for column in choice["logprobs"].values()] == [3] * 4
    assert answer["usage"]["completion_tokens"] == 0


PARROT = "I like 🦜 and café. Then"


def columns_of(client, stream: bool, **fields) -> tuple[str, dict]:
    """A completion's text and its log-probs' columns, whole or put together of chunks."""
    if not stream:
        choice = complete(client, **fields)["choices"][0]
        return choice["text"], choice["logprobs"]
    text = client.post("/v1/completions", json=GREEDY | fields | {"stream": True}).text
    chunks = [json.loads(chunk)["choices"][0] for chunk in events(text)[:-1]]
    names = chunks[0]["logprobs"]
    columns = {name: [value for chunk in chunks for value in chunk["logprobs"][name]] for name in names}
    return "".join(chunk["text"] for chunk in chunks), columns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_text_offset_is_where_the_token_stands_in_the_text(client, stream, as_ids):
    """Of a prompt's tokens and of those that a random model says: most of these are pieces that make no character."""
    prompt = PARROT
    if as_ids:  # with special tokens, which the text leaves out
        ids = client.post("/tokenize", json={"prompt": PARROT, "add_special_tokens": False}).json()["tokens"]
        prompt = [256, *ids[:9], 257, *ids[9:], 257]
    text, columns = columns_of(client, stream, prompt=prompt, echo=True, logprobs=2, max_tokens=30)
    assert text.startswith(PARROT)
    special = {"<|im_start|>", "<|im_end|>"}
    num_whole = 0
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        if token.startswith("bytes:"):
            assert text[offset] in "🦜é\ufffd" or not text[offset].isascii()
        elif token not in special:
            assert text[offset : offset + len(token)] == token
            num_whole += 1
    assert num_whole >= 19
    assert columns["text_offset"] == sorted(columns["text_offset"])
    parrot = [o for t, o in zip(columns["tokens"], columns["text_offset"]) if t in (r"bytes:\xf0", r"bytes:\x9f")][:2]
    assert parrot == [PARROT.index("🦜")] * 2


@pytest.mark.parametrize("seed", range(3))
def test_every_alternative_has_a_name_and_bytes_of_its_own(client, seed):
    ask = {"temperature": 1.0, "seed": seed, "max_tokens": 40, "ignore_eos": True}
    columns = complete(client, logprobs=3, **ask)["choices"][0]["logprobs"]
    for token, top in zip(columns["tokens"], columns["top_logprobs"]):
        assert token in top and len(top) in (3, 4)
    body = ask | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]
    assert any(entry["token"].startswith("bytes:") for entry in content)
    for entry in content:
        assert len({tuple(best["bytes"]) for best in entry["top_logprobs"] if best["bytes"]}) >= 2
        assert len({best["token"] for best in entry["top_logprobs"]}) == 3


def id_of(client, character: str) -> int:
    (token_id,) = client.post("/tokenize", json={"prompt": character, "add_special_tokens": False}).json()["tokens"]
    return token_id


@pytest.mark.parametrize(
    ("allowed", "fields"),
    [
        ("a", {"bad_words": ["a"]}),
        ("ab", {"bad_words": ["b", "a"]}),
        ("a", {"stop_token_ids": "a", "min_tokens": 1}),
        ("", {"min_tokens": 1, "ignore_eos": False}),  # the end of the text alone
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_constraints_that_leave_no_token_are_the_callers_fault(client, engine, allowed, fields, stream):
    ids = [id_of(client, character) for character in allowed] or list(engine.tokenizer.eos_token_ids)
    fields = {name: ids if value == "a" else value for name, value in fields.items()}
    ask = GREEDY | {"prompt": "a", "stream": stream, "allowed_token_ids": ids}
    response = client.post("/v1/completions", json=ask | fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "BadRequestError", "allowed_token_ids")
    assert client.post("/v1/completions", json=ask | {"logit_bias": {ids[0]: -100}}).status_code == 200


def test_constraints_that_leave_no_token_later_are_the_callers_fault_too(client):
    ask = GREEDY | {"prompt": "b", "allowed_token_ids": [id_of(client, "a")], "bad_words": ["aa"], "n": 2}
    response = client.post("/v1/completions", json=ask)
    says = "no token is left to sample: what the request allows, bans and biases excludes all of them"
    error = {"message": says, "type": "BadRequestError", "param": None, "code": 400}
    assert (response.status_code, response.json()) == (400, {"error": error})
    response = client.post("/v1/completions", json=ask | {"stream": True})
    if response.status_code == 400:  # it was over before the first token could be sent
        assert response.json() == {"error": error}
        return
    *chunks, last, done = events(response.text)
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) in ("a", "aa")
    assert json.loads(last) == {"error": error} and done == "[DONE]"


NASTY = st.sampled_from(
    [None, True, False, 0, -1, 1, 2, 3.0, 2.5, -0.0, 5e-324, 1e-9, 1e308, 2**31, 2**63, 2**64, 10**40, "", " ", "\n", "a",
     "\x00", "🦜", "é" * 40, [], [""], ["\n"], ["a", "🦜"], [0], [97], [257], [97, 97], [-1], [258], [1.0], [2**70], [[]],
     [[97]], [["a"]], [None], {}, {"97": -100}, {"97": 1e308}, {"a": 1}, {"include_usage": True}, {"type": "text"}, "never"]
)  # fmt: skip
CONSTRAINTS = st.fixed_dictionaries({}, optional={
    "allowed_token_ids": st.lists(st.integers(0, 257), min_size=1, max_size=3),
    "bad_words": st.lists(st.text("ab \n", min_size=1, max_size=3), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 257).map(str), st.sampled_from([-100, 100]), max_size=3),
    "min_tokens": st.integers(0, 3), "stop_token_ids": st.lists(st.integers(0, 257), max_size=3),
    "temperature": st.sampled_from([0, 1e-6, 1e-5, 1, 100]), "top_p": st.sampled_from([5e-324, 0.5, 1]),
    "top_k": st.sampled_from([-1, 1, 3]), "min_p": st.sampled_from([0, 5e-324, 1]), "seed": st.integers(0, 9),
    "repetition_penalty": st.sampled_from([0.01, 100]), "presence_penalty": st.sampled_from([-2, 2]),
    "n": st.integers(1, 2), "logprobs": st.integers(0, 2), "echo": st.booleans(),
})  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    constraints=CONSTRAINTS,
    nasty=st.dictionaries(
        st.sampled_from(sorted(CompletionBody.model_fields.keys() | ChatBody.model_fields.keys())), NASTY, max_size=3
    ),
    stream=st.booleans(),
)
def test_no_body_makes_the_server_fail(client, path, constraints, nasty, stream):
    """Whatever a client asks for: it is answered, or it is the client's fault."""
    if path == "/v1/chat/completions":
        constraints.pop("echo", None)
        if "logprobs" in constraints:
            constraints |= {"logprobs": True, "top_logprobs": constraints["logprobs"]}
    start = {"prompt": "ab"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = start | {"max_tokens": 4, "stream": stream} | constraints | nasty
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (body, response.text)
    assert "InternalServerError" not in response.text, (body, response.text)


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(client, engine):
    """As evaluation harnesses score texts: only what is generated needs room beyond."""
    ids = [number % 256 for number in range(engine.max_model_len)]
    ask = {"echo": True, "max_tokens": 0, "logprobs": 1}
    answer = complete(client, ids, **ask)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    assert [len(column) for column in choice["logprobs"].values()] == [len(ids)] * 4
    shorter = complete(client, ids[:-3], **ask)["choices"][0]["logprobs"]
    for whole, part in zip(choice["logprobs"]["token_logprobs"][1:], shorter["token_logprobs"][1:]):
        assert whole == pytest.approx(part, abs=1e-4)
    assert complete(client, ids, echo=True, max_tokens=0)["choices"][0]["logprobs"] is None
    assert complete(client, [5], n=2, **ask)["choices"][1]["text"] == answer["choices"][0]["text"][5]
    for more in ({"max_tokens": 1}, {"max_tokens": None}):
        response = client.post("/v1/completions", json={"prompt": ids} | ask | more)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    response = client.post("/v1/completions", json={"prompt": [*ids, 1]} | ask)
    says = f"requested {len(ids) + 1} tokens ({len(ids) + 1} in the prompt, 0 in the completion)"
    assert says in response.json()["error"]["message"]


def test_prompt_logprobs_are_given_by_token_id(client):
    choice = complete(client, [0, 5, 9], max_tokens=2, prompt_logprobs=1)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None and [next(iter(entry)) for entry in others] == ["5", "9"]
    assert {*others[0]["5"]} == {"logprob", "rank", "decoded_token"}
    body = GREEDY | {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_biases_penalties_and_bans_reach_the_engine(client):
    choice = complete(client, max_tokens=6, logit_bias={"70": 100}, presence_penalty=2)["choices"][0]
    assert choice["token_ids"] == [70] * 6
    choice = complete(client, max_tokens=6, logit_bias={"70": 100}, bad_words=["gg"])["choices"][0]  # 70 is g
    assert choice["token_ids"][::2] == [70] * 3 and 70 not in choice["token_ids"][1::2]
    assert set(complete(client, max_tokens=6, allowed_token_ids=[5, 6])["choices"][0]["token_ids"]) <= {5, 6}


def test_a_stop_token_ends_the_text_and_is_named(client):
    ids = complete(client, max_tokens=8)["choices"][0]["token_ids"]
    stop = next(token for n, token in enumerate(ids) if n >= 2 and token not in ids[:n])
    choice = complete(client, max_tokens=8, stop_token_ids=[stop])["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_usage_counts_what_the_prefix_cache_gave(client):
    prompt = "a long enough prompt to fill at least two blocks"
    complete(client, prompt, max_tokens=1)
    usage = complete(client, prompt, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_a_salt_keeps_a_tenants_prefixes_to_itself(client):
    def cached(**fields) -> int:
        usage = complete(client, "a prompt of many words, long enough", max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 32]
    for salt, says in ((7, "cache_salt must be a string"), ("", "1 to 256 characters"), ("x" * 257, "got 257")):
        response = client.post("/v1/completions", json={"prompt": "x", "cache_salt": salt})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "cache_salt") and says in error["message"]


def test_the_prefix_cache_is_reset_over_http_in_developer_mode_alone(client, serve, engine):
    assert client.post("/reset_prefix_cache").status_code == 404
    developer = serve(engine, developer_mode=True)
    complete(client, "another prompt of many words, long enough", max_tokens=1)
    assert developer.post("/reset_prefix_cache").json() == {"status": "ok"}
    usage = complete(client, "another prompt of many words, long enough", max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    asks = client, engine, [{"prompt": "x", "max_tokens": 250}]
    with in_the_middle_of(*asks), ThreadPoolExecutor(1) as thread:
        answer = thread.submit(developer.post, "/reset_prefix_cache")
        wait_until(lambda: engine._answers)
        os.kill(engine.pid, signal.SIGCONT)
        error = answer.result().json()["error"]
    assert (error["code"], error["type"]) == (409, "ConflictError") and "in use" in error["message"]


def test_tokens_survive_the_round_trip(client):
    for text in ("hello <|im_end|> é😀", "\x00\u2028", " "):
        tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": [0, 258]}, "258"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [2**70]}, str(2**70)),
        ({"prompt": "a", "stop_token_ids": [2**70]}, str(2**70)),
        ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias holds token id 258; the vocabulary ends at 257"),
        ({"prompt": "a", "allowed_token_ids": [5, 300]}, "allowed_token_ids holds token id 300"),
        ({"prompt": "a", "bad_words": ["a" * 17]}, "17 tokens; it must be 1 to 16"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs is 21; the limit is 20 (max_logprobs)"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "the limit is 20"),
        ({"prompt": "a" * 300}, "300"),
        ({"prompt": "a" * 200, "max_tokens": 100}, "maximum context length is 256 tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, str(10**30)),
        ({"prompt": "a", "min_tokens": 10**30, "max_tokens": 10**30}, str(10**30)),
        ({"prompt": "a", "logprobs": 21}, "20"),
        ({"prompt": "a", "priority": 3}, "scheduling_policy is fcfs"),
        ({"prompt": "a", "use_beam_search": True, "length_penalty": 2000}, "length_penalty must be in [-10, 10]"),
    ],
)
def test_what_the_engine_cannot_serve_is_a_400_with_the_numbers(client, body, says):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]


def test_a_full_queue_is_refused_and_drains(client, engine):
    wait_until(lambda: not engine._streams)
    os.kill(engine.pid, signal.SIGSTOP)  # what the engine has not been able to take counts as waiting
    with http_sockets(client.base_url, 6, {"prompt": "a", "max_tokens": 4}):  # two would run at once, four wait
        wait_until(lambda: len(engine._streams) == 6)
        response = client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 429 and response.headers["retry-after"]
        assert "the limit is 4" in response.json()["error"]["message"]
        os.kill(engine.pid, signal.SIGCONT)
        wait_until(lambda: not engine._streams)
    assert complete(client, max_tokens=1)["usage"]["completion_tokens"] == 1


class http_sockets:
    """Requests on sockets of our own, which close without a word in the end."""

    def __init__(self, url: httpx.URL, count: int, body: dict):
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}"
        self.sockets = [socket.create_connection((url.host, url.port)) for _ in range(count)]
        for connection in self.sockets:
            connection.sendall(head.encode() + b"\r\n\r\n" + content)

    def __enter__(self) -> list[socket.socket]:
        return self.sockets

    def __exit__(self, *_) -> None:
        for connection in self.sockets:
            connection.close()


def wait_until_quiet(engine):
    """Until a process that stands still has been told all that there is to tell, and all that it had said is heard."""
    num_steps = None
    while num_steps != (num_steps := engine.metrics.iteration_tokens.count) or not engine._engine._outbox.empty():
        time.sleep(0.1)


@contextlib.contextmanager
def in_the_middle_of(client, engine, bodies: list[dict]) -> Iterator[list[socket.socket]]:
    """Sends requests and stops the engine's process at a moment when all of them run; yields their sockets. Tries again
    where this process was so late that one had ended."""
    wait_until(lambda: not engine._streams)
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            stack.callback(os.kill, engine.pid, signal.SIGCONT)
            os.kill(engine.pid, signal.SIGSTOP)
            sockets = [
                stack.enter_context(http_sockets(client.base_url, 1, GREEDY | {"stream": True} | body))[0]
                for body in bodies
            ]
            wait_until(lambda: len(engine._streams) == len(bodies))
            os.kill(engine.pid, signal.SIGCONT)
            num_steps = engine.metrics.iteration_tokens.count
            wait_until(lambda: engine.metrics.iteration_tokens.count - num_steps > 20)  # past every prompt
            os.kill(engine.pid, signal.SIGSTOP)
            wait_until_quiet(engine)
            if engine.metrics.levels.num_running == len(bodies):
                yield sockets
                return
        wait_until(lambda: not engine._streams)
    pytest.fail("no moment was found when all of the requests ran")


def steps_until_free(client, engine, monkeypatch, stream) -> int:
    """The engine's process stands still while the client goes, so that every step after that is counted."""
    metrics, num_steps, asked = engine.metrics, {}, threading.Event()

    def on_levels(levels):
        EngineMetrics.on_levels(metrics, levels)
        num_steps["done"] = metrics.iteration_tokens.count

    def noted(name, *arguments):
        send(name, *arguments)
        if name == "abort":
            asked.set()

    send = engine._engine.send
    stays, goes = {"prompt": "b", "max_tokens": 250}, {"prompt": "abcdefgh", "max_tokens": 200, "stream": stream}
    with in_the_middle_of(client, engine, [stays, goes]) as sockets, contextlib.ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr(engine._engine, "send", noted)
        patch.setattr(metrics, "on_levels", on_levels)
        sockets[1].close()
        assert asked.wait(20)
        wait_until_quiet(engine)
        num_steps["asked"] = metrics.iteration_tokens.count
        os.kill(engine.pid, signal.SIGCONT)
        wait_until(lambda: "done" in num_steps)
        assert metrics.levels.num_running <= 1
    wait_until(lambda: not engine._streams and not metrics.levels.num_running)
    assert metrics.levels.num_physical_blocks == metrics.levels.kv_cache_usage == 0
    return num_steps["done"] - num_steps["asked"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_within_two_steps(client, engine, monkeypatch, stream):
    """From when the engine's process has read it, which the system may let it do a step or two late: not every time."""
    seen = []
    while not seen or seen[-1] > 2:
        assert len(seen) < 5, f"it took {seen} steps"
        seen.append(steps_until_free(client, engine, monkeypatch, stream))


def test_the_openai_client_works_whole_streamed_and_refused(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert client.completions.create(model="tiny", prompt="a", logprobs=1).choices[0].logprobs.tokens
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(**ask | {"model": "gpt"})
    with pytest.raises(openai.BadRequestError, match=r"n is 3; the limit is 2 \(max_num_seqs\)"):
        client.chat.completions.create(**ask, n=3)
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(**ask, tools=[{"type": "function", "function": {"name": "f"}}])


def test_metrics_count_what_was_served(client):
    def read():
        lines = client.get("/metrics").text.splitlines()
        return {line.split(" ")[0].split("{")[0]: float(line.split(" ")[-1]) for line in lines if line[0] != "#"}

    before = read()
    complete(client, "unheard of", max_tokens=6)
    after = read()
    assert after["jpaged:generation_tokens_total"] - before["jpaged:generation_tokens_total"] == 6
    assert after["jpaged:prompt_tokens_total"] - before["jpaged:prompt_tokens_total"] == len("unheard of")
    assert after["jpaged:time_to_first_token_seconds_count"] - before["jpaged:time_to_first_token_seconds_count"] == 1


def test_many_clients_at_once_get_each_their_own_answer(url):
    prompts = ["ab", "cd"]
    answers = {}

    def ask(prompt):
        with httpx.Client(base_url=url, timeout=60) as client:
            answers[prompt] = [complete(client, prompt, max_tokens=12)["choices"][0]["token_ids"] for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({tuple(ids) for ids in repeats}) == 1 for repeats in answers.values())
    assert answers["ab"][0] != answers["cd"][0]
