"""The server on a real socket, with a scripted engine: what is on the wire, and every way for it to go wrong."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from http_server import events, http_server
from scripted_engine import ScriptedEngine, delta, echo, forever, silent

from jpaged.errors import QueueFullError
from jpaged.programs import Progress

MESSAGES = [{"role": "user", "content": "hi"}]


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def error_of(
    response: httpx.Response, status: int, kind: str, param: str | None = None, code: str | None = None
) -> str:
    """The message of an error in OpenAI's envelope."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, code or status)
    assert "\n" not in error["message"]
    return error["message"]


def post_raw(url: str, path: str, body: bytes) -> socket.socket:
    """A request on a socket of our own, so that the test decides when it closes."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


# what is on the wire


def test_a_completion_has_openais_shape(serve):
    answer = serve(ScriptedEngine()).post("/v1/completions", json={"prompt": "hi", "request_id": "mine"}).json()
    assert answer.pop("created") == pytest.approx(time.time(), abs=60)
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": "scripted",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_chat_completion_has_openais_shape(serve):
    answer = serve(ScriptedEngine()).post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "<user>hi\n<assistant>"}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_a_stream_ends_with_usage_and_done(serve):
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    response = serve(ScriptedEngine()).post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    first, last, usage = map(json.loads, chunks)
    assert [c["choices"][0]["text"] for c in (first, last)] == ["h", "i"]
    assert [c["choices"][0]["finish_reason"] for c in (first, last)] == [None, "stop"]
    assert first["usage"] is None
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    assert len({c["id"] for c in (first, last, usage)}) == 1


def test_a_chat_stream_opens_with_the_role(serve):
    response = serve(ScriptedEngine()).post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    first, *rest, _ = events(response.text)
    assert json.loads(first)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = [json.loads(chunk)["choices"][0] for chunk in rest]
    assert "".join(choice["delta"]["content"] for choice in said) == "<user>hi\n<assistant>"
    assert said[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["ab", "c"], [[97, 98], [99]]])
def test_each_prompt_of_a_list_is_a_choice_with_its_index(serve, prompts, stream):
    engine = ScriptedEngine()
    response = serve(engine).post("/v1/completions", json={"prompt": prompts, "stream": stream})
    answers = [json.loads(c) for c in events(response.text)[:-1]] if stream else [response.json()]
    texts = ["", ""]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["ab", "c"]
    assert len(set(engine.running)) == 2  # engine requests of their own


def test_completion_logprobs_are_columns_and_their_offsets_go_on_over_chunks(serve):
    client = serve(ScriptedEngine())
    whole = client.post("/v1/completions", json={"prompt": "hi", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["h", "i"],
        "token_logprobs": [-9999.0, -9999.0],  # minus infinity is no JSON
        "top_logprobs": [{"?": -0.1, "h": -9999.0}, {"?": -0.1, "i": -9999.0}],
        "text_offset": [0, 1],
    }
    stream = client.post("/v1/completions", json={"prompt": "hi", "logprobs": 1, "stream": True}).text
    chunks = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in events(stream)[:-1]]
    assert {name: chunks[0][name] + chunks[1][name] for name in whole} == whole


def test_chat_logprobs_are_entries_with_exactly_the_best(serve):
    client = serve(ScriptedEngine())
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    entry = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"][0]
    assert entry == {
        "token": "<", "logprob": -9999.0, "bytes": [60],
        "top_logprobs": [{"token": "?", "logprob": -0.1, "bytes": [63]}],
    }  # fmt: skip
    del body["top_logprobs"]
    entry = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"] == []


def test_token_ids_come_along_when_asked_for(serve):
    client = serve(ScriptedEngine())
    choice = client.post("/v1/completions", json={"prompt": "hi", "return_token_ids": True}).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([256, 104, 105], [104, 105])
    body = {"messages": MESSAGES, "return_token_ids": True, "stream": True}
    first, second, *_ = events(client.post("/v1/chat/completions", json=body).text)
    assert json.loads(first)["prompt_token_ids"][:1] == [ord("<")]  # a template brings its own special tokens
    assert json.loads(second)["choices"][0]["token_ids"] == [ord("<")]


@pytest.mark.parametrize("text", ["\u2028\u0085\u2029", "é😀\ufffd", 'a"\\\n\r\x00\x1f'])
def test_any_text_survives_the_stream_in_one_event(serve, text):
    async def say(_):
        yield delta(97)
        last = delta(97, "stop")
        last.text = text
        yield last

    response = serve(ScriptedEngine(say)).post("/v1/completions", json={"prompt": "a", "stream": True})
    lines = [line for line in response.text.splitlines() if line]  # as careless clients split
    assert json.loads(lines[1].removeprefix("data: "))["choices"][0]["text"] == text


def test_a_lone_surrogate_from_the_engine_cannot_break_the_answer(serve):
    async def say(_):
        last = delta(97, "stop")
        last.text = "a\ud800b"
        yield last

    assert (
        serve(ScriptedEngine(say)).post("/v1/completions", json={"prompt": "a"}).json()["choices"][0]["text"] == "a?b"
    )


def test_held_back_text_makes_no_empty_chunks(serve):
    async def say(_):
        for finish_reason, text in ((None, ""), (None, "ab"), (None, ""), ("length", "")):
            item = delta(97, finish_reason)
            item.text = text
            yield item

    chunks = events(serve(ScriptedEngine(say)).post("/v1/completions", json={"prompt": "a", "stream": True}).text)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks[:-1]]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("ab", None), ("", "length")]


# what the engine is asked for


def params_of(serve, path: str, body: dict, **engine_options):
    engine = ScriptedEngine()
    for name, value in engine_options.items():
        setattr(engine, name, value)
    response = serve(engine).post(path, json=body)
    assert response.status_code == 200, response.text
    return engine.validated[0]


def test_max_tokens_is_16_for_completions_less_where_less_fits_and_open_for_chat(serve):
    assert params_of(serve, "/v1/completions", {"prompt": "hi"})[1].max_tokens == 16
    assert params_of(serve, "/v1/completions", {"prompt": "hi"}, max_model_len=10)[1].max_tokens == 7
    assert params_of(serve, "/v1/chat/completions", {"messages": MESSAGES})[1].max_tokens is None
    defaults = {"max_tokens": 5}
    assert params_of(serve, "/v1/completions", {"prompt": "hi"}, generation_defaults=defaults)[1].max_tokens == 5


def test_special_tokens_are_added_to_a_prompt_and_not_to_a_template(serve):
    assert params_of(serve, "/v1/completions", {"prompt": "hi"})[0][0] == 256
    assert params_of(serve, "/v1/completions", {"prompt": "hi", "add_special_tokens": False})[0][0] == ord("h")
    assert params_of(serve, "/v1/chat/completions", {"messages": MESSAGES})[0][0] == ord("<")
    body = {"messages": MESSAGES, "add_special_tokens": True, "add_generation_prompt": False}
    assert bytes(params_of(serve, "/v1/chat/completions", body)[0][1:]) == b"<user>hi\n"


def test_a_final_message_can_be_continued_and_then_nothing_prompts_for_another(serve):
    messages = [*MESSAGES, {"role": "assistant", "content": "<"}]
    body = {"messages": messages, "continue_final_message": True}
    assert bytes(params_of(serve, "/v1/chat/completions", body)[0]) == b"<user>hi\n<assistant><"
    client = serve(ScriptedEngine())
    for more in ({}, {"add_generation_prompt": False}):
        assert bytes(client.post("/tokenize", json=body | more).json()["tokens"]) == b"<user>hi\n<assistant><"
    whole = client.post("/tokenize", json=body | {"continue_final_message": None}).json()["tokens"]
    assert bytes(whole) == b"<user>hi\n<assistant><\n<assistant>"
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = client.post(path, json=body | {"add_generation_prompt": True})
        says = error_of(answer, 400, "BadRequestError", "continue_final_message")
        assert says == "continue_final_message and add_generation_prompt cannot both be true"


def test_extras_reach_the_engine(serve):
    extras = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [3], "include_stop_str_in_output": True,
              "ignore_eos": True, "skip_special_tokens": False, "stop": ["x"], "seed": 7, "logprobs": 2}  # fmt: skip
    params = params_of(serve, "/v1/completions", {"prompt": "hi"} | extras)[1]
    assert {name: getattr(params, name) for name in extras} == extras | {"stop_token_ids": (3,), "stop": ("x",)}


# errors


def test_bad_requests_are_400_in_the_envelope_and_the_server_goes_on(serve):
    client = serve(ScriptedEngine())
    json_type = {"content-type": "application/json"}
    says = error_of(client.post("/v1/completions", content=b"{", headers=json_type), 400, "BadRequestError")
    assert "not valid JSON" in says
    says = error_of(client.post("/v1/completions", json={"prompt": "a", "suffix": "b"}), 400, "BadRequestError", "suffix")
    assert says == "suffix is not supported, got 'b'; leave it out"
    says = error_of(client.post("/v1/completions", json={"prompt": "a", "n": 0}), 400, "BadRequestError", "n")
    assert says == "n must be in [1, 128], got 0"
    body = {"prompt": "a", "best_of": 3, "n": 2, "stream": True}
    says = error_of(client.post("/v1/completions", json=body), 400, "BadRequestError", "best_of")
    assert says == "best_of (3) over n (2) cannot be streamed: which are best shows at the end"
    says = error_of(client.post("/v1/completions", json=body | {"best_of": 1}), 400, "BadRequestError", "best_of")
    says = error_of(client.post("/v1/completions", json={"prompt": ["a"] * 1025, "n": 2}), 400, "BadRequestError", "n")
    assert says == "1025 prompts with n = 2 are 2050 choices, the limit is 2048"
    body = {"messages": MESSAGES, "chat_template_kwargs": {"refuse": True}}
    error_of(client.post("/v1/chat/completions", json=body), 400, "BadRequestError", "messages")
    body = {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}
    error_of(client.post("/v1/chat/completions", json=body), 400, "BadRequestError", "chat_template_kwargs")
    says = error_of(client.post("/v1/completions", data={"prompt": "a"}), 400, "BadRequestError")
    assert "application/x-www-form-urlencoded" in says
    zipped = json_type | {"content-encoding": "gzip"}
    error_of(client.post("/v1/completions", content=b"x", headers=zipped), 400, "BadRequestError")
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "num_characters"),
    [("/v1/completions", "prompt", 999), ("/v1/chat/completions", "messages", 982)],  # and what a template adds
)
def test_a_prompt_that_does_not_fit_is_recognised_by_its_code(serve, path, field, num_characters):
    """As agents do, which trim and try again."""
    client = serve(ScriptedEngine())

    def ask(num_characters: int) -> str:
        text = "a" * num_characters
        body = {field: text if field == "prompt" else [{"role": "user", "content": text}]}
        return error_of(client.post(path, json=body), 400, "BadRequestError", field, "context_length_exceeded")

    assert ask(num_characters).startswith("This model's maximum context length is 1000 tokens. However, you requested 1")
    says = "This model's maximum context length is 1000 tokens, which hold 1000 bytes of text at most. However, "
    assert ask(2000).startswith(says + field)


def test_an_unknown_model_and_an_unknown_path_are_404(serve):
    client = serve(ScriptedEngine(served_model_name=("a", "b")))
    says = error_of(client.post("/v1/completions", json={"prompt": "a", "model": "c"}), 404, "NotFoundError", "model")
    assert says == "the model 'c' is not served here, only a, b"
    error_of(client.get("/v1/models/c/d"), 404, "NotFoundError", "model")
    error_of(client.get("/nowhere"), 404, "NotFoundError")
    error_of(client.get("/v1/completions"), 405, "MethodNotAllowedError")
    assert client.post("/v1/completions", json={"prompt": "a", "model": "b"}).json()["model"] == "b"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b"]
    assert client.get("/v1/models/b").json()["max_model_len"] == 1000


def test_a_body_over_the_limit_is_413_declared_or_not(serve):
    client = serve(ScriptedEngine(), max_body_size=100)
    body = json.dumps({"prompt": "a" * 100}).encode()
    headers = {"content-type": "application/json"}
    error_of(client.post("/v1/completions", content=body, headers=headers), 413, "RequestEntityTooLargeError")
    chunked = client.post("/v1/completions", content=iter([body[:60], body[60:]]), headers=headers)
    assert "100 bytes" in error_of(chunked, 413, "RequestEntityTooLargeError")
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_key_is_needed_where_keys_are_set(serve):
    client = serve(ScriptedEngine(), api_key=("one", "two"))
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"authorization": "Bearer"}):
        response = client.get("/v1/models", headers=headers)
        error_of(response, 401, "AuthenticationError")
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/tokenize", "/v1/completions"):
        error_of(client.post(path, json={"prompt": "a"}), 401, "AuthenticationError")
    for key in ("one", "two"):
        assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert client.get(path).status_code == 200


def test_a_full_queue_is_429_with_retry_after_whole_or_streamed(serve):
    async def full(_):
        raise QueueFullError("8 requests wait already, the limit is 8")
        yield

    client = serve(ScriptedEngine(full))
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert "the limit is 8" in error_of(response, 429, "RateLimitError")
        assert int(response.headers["retry-after"]) > 0
    assert 'admission_rejections_total{model_name="scripted",reason="queue_full"} 2.0' in client.get("/metrics").text


def test_one_choice_refused_ends_the_others(serve):
    async def full_for_b(ids):
        if ids == [98]:
            raise QueueFullError("full")
        async for item in forever(ids):
            yield item

    engine = ScriptedEngine(full_for_b)
    error_of(serve(engine).post("/v1/completions", json={"prompt": [[97], [98]]}), 429, "RateLimitError")
    wait_until(lambda: sorted(engine.closed) == sorted(engine.running))


async def fail_second(_):
    yield delta(97)
    yield delta(97, "error", error="the step failed")


def test_an_engine_error_in_a_stream_is_an_event_and_done(serve):
    response = serve(ScriptedEngine(fail_second)).post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.status_code == 200
    _, error, done = events(response.text)
    assert json.loads(error) == {
        "error": {"message": "the step failed", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert done == "[DONE]"


def test_an_engine_error_before_the_first_byte_is_a_500(serve):
    async def fail_first(_):
        yield delta(97, "error", error="the step failed")

    assert (
        error_of(
            serve(ScriptedEngine(fail_second)).post("/v1/completions", json={"prompt": "a"}), 500, "InternalServerError"
        )
        == "the step failed"
    )
    response = serve(ScriptedEngine(fail_first)).post("/v1/completions", json={"prompt": "a", "stream": True})
    error_of(response, 500, "InternalServerError")


def test_a_bug_of_ours_is_a_500_without_internals(serve):
    async def bug(_):
        raise KeyError("secret")
        yield

    client = serve(ScriptedEngine(bug))
    assert "secret" not in error_of(client.post("/v1/completions", json={"prompt": "a"}), 500, "InternalServerError")
    assert client.get("/health").status_code == 200


# clients that go away, servers that stop


@pytest.mark.parametrize("script", [forever, silent])
@pytest.mark.parametrize(
    "body", [{"prompt": "a", "stream": True}, {"prompt": "a"}, {"prompt": ["a", "b"], "stream": True}]
)
def test_a_client_that_goes_away_ends_its_requests_at_once(serve, script, body):
    engine = ScriptedEngine(script)
    url = str(serve(engine).base_url)
    client = post_raw(url, "/v1/completions", json.dumps(body).encode())
    wait_until(lambda: len(engine.running) == (2 if isinstance(body["prompt"], list) else 1))
    if script is forever and body.get("stream"):
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert not engine.closed
    client.close()
    wait_until(lambda: sorted(engine.closed) == sorted(engine.running), seconds=1)


def test_a_server_that_stops_says_so_to_those_who_wait():
    replies = {}
    engine = ScriptedEngine(forever)
    with http_server(lambda: engine) as url:

        def ask(stream: bool):
            replies[stream] = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": stream}, timeout=10)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.running) == 2)
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    error_of(replies[False], 503, "ServiceUnavailableError")
    *_, error, done = events(replies[True].text)
    assert json.loads(error)["error"]["code"] == 503 and done == "[DONE]"
    assert sorted(engine.closed) == sorted(engine.running)


# states


def test_http_answers_while_the_model_loads():
    is_loaded = threading.Event()

    def load():
        is_loaded.wait(10)
        return ScriptedEngine()

    with http_server(load) as url, httpx.Client(base_url=url) as client:
        for path in ("/health", "/ready"):
            response = client.get(path)
            assert response.status_code == 503 and response.json()["status"] == "loading"
        error_of(client.post("/v1/completions", json={"prompt": "a"}), 503, "ServiceUnavailableError")
        assert client.get("/version").status_code == 200
        is_loaded.set()
        wait_until(lambda: client.get("/health").status_code == 200)


def test_ready_follows_the_compilation_and_requests_are_answered_meanwhile(serve):
    engine = ScriptedEngine()
    engine.progress = Progress(3, 20)
    client = serve(engine)
    response = client.get("/ready")
    assert response.status_code == 503
    assert (response.json()["num_compiled"], response.json()["num_programs"]) == (3, 20)
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    engine.progress = Progress(20, 20, is_complete=True)
    assert client.get("/ready").json() == {"status": "ok", "num_compiled": 20, "num_programs": 20}


def test_a_dead_engine_is_told_with_its_reason(serve):
    engine = ScriptedEngine()
    engine.death = "the device is gone"
    client = serve(engine)
    for path in ("/health", "/ready"):
        response = client.get(path)
        assert response.status_code == 503 and response.json()["reason"] == "the device is gone"


# the other routes


def test_tokenize_and_detokenize(serve):
    client = serve(ScriptedEngine())
    answer = client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 1000, "tokens": [256, 104, 105], "token_strs": ["Ā", "h", "i"]}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert bytes(chat["tokens"]) == b"<user>hi\n<assistant>" and chat["token_strs"] is None
    assert client.post("/detokenize", json={"tokens": [104, 105]}).json() == {"prompt": "hi"}
    says = error_of(client.post("/detokenize", json={"tokens": [-1]}), 400, "BadRequestError", "tokens")
    assert says == "tokens must be in [0, 258), got -1"


def test_metrics_are_prometheus_text(serve):
    response = serve(ScriptedEngine()).get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'jpaged:num_requests_running{model_name="scripted"} 0.0' in response.text


def test_origins_may_call_only_where_they_are_allowed(serve):
    headers = {"origin": "http://page", "access-control-request-method": "POST"}
    closed = serve(ScriptedEngine())
    assert "access-control-allow-origin" not in closed.get("/version", headers=headers).headers
    opened = serve(ScriptedEngine(), allowed_origins=("http://page",), api_key=("one",))
    preflight = opened.options("/v1/completions", headers=headers)
    assert preflight.headers["access-control-allow-origin"] == "http://page"


def test_the_api_description_shows_the_bodies(serve):
    schemas = serve(ScriptedEngine()).get("/openapi.json").json()["components"]["schemas"]
    assert "min_p" in schemas["CompletionBody"]["properties"]
    assert "messages" in schemas["ChatBody"]["properties"]


def test_a_slow_reader_does_not_hold_up_the_others(serve):
    async def flood(_):
        text = "a" * 10_000
        while True:
            item = delta(97)
            item.text = text
            yield item
            await asyncio.sleep(0)

    engine = ScriptedEngine(flood)
    client = serve(engine)
    stalled = post_raw(str(client.base_url), "/v1/completions", b'{"prompt": "a", "stream": true}')
    wait_until(lambda: engine.running)
    time.sleep(0.3)  # the buffers of the socket are full now
    engine.script = echo
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    stalled.close()
    wait_until(lambda: len(engine.closed) == 2, seconds=2)
