"""The client against scripted servers: what it measures, and what becomes of a server's failures."""

import asyncio
import json

import pytest

from jpaged.bench.client import ChatClient, CompletionClient
from jpaged.bench.http import HttpClient
from jpaged.bench.load import send_all
from jpaged.bench.workloads import BenchRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n"
REQUEST = BenchRequest([1, 2, 3], 4)


def event(*token_ids: int, **more) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x", "token_ids": list(token_ids)}], **more}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(finish_reason: str | None = None, **fields) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def run(
    answer: list[bytes | float], *, requests=(REQUEST,), arrivals=(0.0,), timeout=5.0, kind=CompletionClient, **load
):
    """The outcomes of requests to a server that answers each with these bytes, pausing for a number's seconds."""

    async def respond(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        for part in answer:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        writer.close()

    async def main():
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            http = HttpClient(f"http://127.0.0.1:{port}/prefix/", {})
            client = kind(http, "/v1/completions", {"stream": True, "seed": None}, timeout)
            return (await send_all(client, requests, arrivals, **load))[0]

    bodies = []
    return asyncio.run(main()), bodies


def whole(*events: bytes) -> list[bytes]:
    return [HEAD, *(chunk(data) for data in events), chunk(END), b"0\r\n\r\n"]


def test_chunks_are_timed_as_they_come_and_tokens_counted():
    parts = [HEAD, 0.1, chunk(event(7)), 0.1, chunk(event(8, 9)), chunk(event()), chunk(END), b"0\r\n\r\n"]
    (outcome,), bodies = run(parts)
    assert outcome.error is None and outcome.num_output_tokens == 3
    assert 0.09 < outcome.ttft < 1 and 0.09 < outcome.itls[0] < 1 and len(outcome.itls) == 1
    assert bodies == [{"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}]  # a field of None is left out


def test_events_may_be_cut_anywhere_and_end_in_any_line_break():
    data = (event(7) + b": a comment\n\n" + event(8) + END).replace(b"\n", b"\r\n")
    (outcome,), _ = run([HEAD, *(chunk(data[i : i + 3]) for i in range(0, len(data), 3)), b"0\r\n\r\n"])
    assert outcome.error is None and outcome.num_output_tokens == 2


def test_usage_overrules_the_count_and_a_server_without_ids_sends_a_chunk_a_token():
    plain = b'data: {"choices": [{"text": "x"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
    assert run(whole(plain, plain))[0][0].num_output_tokens == 2
    assert run(whole(plain, usage))[0][0].num_output_tokens == 5


def test_a_chunk_without_ids_and_text_is_no_first_token():
    empty, text = (b'data: {"choices": [{"text": "%s"}]}\n\n' % content for content in (b"", b"x"))
    (outcome,), _ = run([HEAD, chunk(empty), 0.2, chunk(text), chunk(empty), chunk(END), b"0\r\n\r\n"])
    assert 0.19 < outcome.ttft < 1 and outcome.num_output_tokens == 1


CHAT = BenchRequest([1, 2, 3], 4, text="one two three")


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_a_chats_first_token_is_its_first_text_or_reasoning_and_not_its_role(field):
    opening = [delta(role="assistant", content=""), delta(content=None), delta(**{field: ""})]
    parts = [HEAD, *map(chunk, opening), 0.3, chunk(delta(**{field: "a"})), 0.1, chunk(delta(content="b"))]
    parts += [0.1, chunk(delta("stop")), 0.1, chunk(END), b"0\r\n\r\n"]
    (outcome,), bodies = run(parts, requests=[CHAT], kind=ChatClient)
    assert outcome.error is None and outcome.num_output_tokens == 2
    assert 0.29 < outcome.ttft < 0.6 and len(outcome.itls) == 1 and 0.09 < outcome.itls[0] < 0.3
    assert 0.19 < outcome.e2e - outcome.ttft < 0.5  # to the end of the answer, and not to that of the stream
    messages = [{"role": "user", "content": "one two three"}]
    assert bodies == [{"messages": messages, "max_completion_tokens": 4, "stream": True}]


def test_usage_counts_a_chats_tokens_where_the_server_gives_it():
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\n'
    events = [delta(role="assistant"), delta(content="a b"), delta("length"), usage]
    assert run(whole(*events), requests=[CHAT], kind=ChatClient)[0][0].num_output_tokens == 9
    assert run(whole(*events[:-1]), requests=[CHAT], kind=ChatClient)[0][0].num_output_tokens == 1


def test_a_chat_without_any_text_has_failed():
    (outcome,), _ = run(whole(delta(role="assistant", content=""), delta("stop")), requests=[CHAT], kind=ChatClient)
    assert outcome.error == "no text came"


@pytest.mark.parametrize(
    "answer, error",
    [
        (
            [b'HTTP/1.1 400 Bad Request\r\nContent-Length: 42\r\n\r\n{"error": {"message": "too\\nlong a one"} }'],
            "HTTP 400: too long a one",
        ),
        ([b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>"], "HTTP 502: <html>"),
        ([HEAD, chunk(event(1)), chunk(b'data: {"error": {"message": "the server is stopping"}}\n\n')], "is stopping"),
        ([HEAD, chunk(event(1))], "without sending complete message body"),
        ([HEAD, chunk(event(1)), b"0\r\n\r\n"], "ended before [DONE]"),
        (whole(), "no token came"),
        (whole(b"data: {oops\n\n"), "Expecting property name"),
        (whole(b"data: [1]\n\n"), "'list' object"),
        ([b"SSH-2.0\r\n\r\n"], "illegal status line"),
        ([], "without sending a response"),
    ],
)
def test_a_failure_is_an_outcome_with_its_reason(answer, error):
    (outcome,), _ = run(answer)
    assert outcome.error is not None and error in outcome.error and "\n" not in outcome.error


def test_a_request_that_does_not_end_fails_after_the_timeout():
    (outcome,), _ = run([HEAD, chunk(event(1)), 1.0], timeout=0.1)
    assert outcome.error == "no end after 0.1 s"


def test_a_slow_server_delays_no_arrival():
    """Closed-loop clients would wait, and leave out the latencies that users see."""
    parts = [HEAD, 0.3, chunk(event(7) + END), b"0\r\n\r\n"]
    arrivals = [0.0, 0.02, 0.04, 0.06]
    outcomes, _ = run(parts, requests=[REQUEST] * 4, arrivals=arrivals)
    assert [outcome.scheduled for outcome in outcomes] == arrivals
    assert all(outcome.error is None and outcome.delay < 0.2 for outcome in outcomes)
    assert max(outcome.sent for outcome in outcomes) < 0.3 < min(outcome.token_times[0] for outcome in outcomes)


def test_max_concurrency_makes_requests_wait_and_the_delay_tells_how_long():
    parts = [HEAD, 0.1, chunk(event(7) + END), b"0\r\n\r\n"]
    outcomes, _ = run(parts, requests=[REQUEST] * 3, arrivals=[0.0] * 3, max_concurrency=1)
    first, second, third = sorted(outcome.delay for outcome in outcomes)
    assert first < 0.09 and second > 0.09 and third > 0.19


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="looks like http"):
        HttpClient(url, {})
