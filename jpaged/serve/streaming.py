"""From deltas to bytes on the wire: JSON, server-sent events, and work that ends when its client does."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jpaged.outputs import OutputDelta
from jpaged.serve.errors import ApiError

DONE = b"data: [DONE]\n\n"
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect tokens otherwise
]

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# line breaks to str.splitlines and none to JSON: clients that split decoded text would tear an event apart
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def to_json(value: object) -> bytes:
    """Compact UTF-8. What UTF-8 cannot hold (a lone surrogate) becomes a question mark."""
    text = _encode(value)
    return text.encode() if text.isascii() else text.translate(_LINE_BREAKS).encode("utf-8", "replace")


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def merge(streams: Sequence[AsyncIterator[OutputDelta]]) -> AsyncIterator[tuple[int, OutputDelta]]:
    """(index of the stream, delta) as they come. Closing it closes every stream; an error of one ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    queue = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[OutputDelta]) -> None:
        async with aclosing(stream):
            async for delta in stream:
                queue.put_nowait((index, delta))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises what its stream raised
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_events(
    send: Send, batches: AsyncIterator[Iterable[dict]], headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """Sends each batch of objects as server-sent events in one write, then [DONE].

    Nothing is sent before the first batch is there, so that what fails before it gets a status of its own. A later
    ApiError becomes an event.
    """
    async with aclosing(batches):
        first = await anext(batches)
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM_HEADERS, *headers]})
        await send({"type": "http.response.body", "body": b"".join(map(event, first)), "more_body": True})
        last = DONE
        try:
            async for batch in batches:
                body = b"".join(map(event, batch))
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            last = event(error.body()) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


class WhileConnected(Response):
    """A response made by `work(send)`, which is cancelled at once when the client goes away.

    When the server stops before the work is done, the client hears it: an error event in a stream, a 503 otherwise.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]):
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def noting_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        work = asyncio.ensure_future(self._work(noting_send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # only a server that stops cancels a request: its last word goes out, and nobody waits for the cancellation
            await _cancel(work, gone)
            if work.cancelled():
                error = ApiError(503, "the server is stopping", headers={"Connection": "close"})
                if not is_started:
                    raise error from None
                await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})
        finally:
            await _cancel(work, gone)
        if not work.cancelled():
            work.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
