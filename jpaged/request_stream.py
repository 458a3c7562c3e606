"""RequestStream: a request's text on its way from the engine's process to the event loop that reads it."""

import asyncio
import contextlib
from collections.abc import Callable

from jpaged.output_processor import OutputProcessor
from jpaged.outputs import OutputDelta, TokenDelta, merge_deltas


class RequestStream:
    """Touched by its loop's thread alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reader: OutputProcessor):
        self.loop, self.reader = loop, reader
        self._outputs: asyncio.Queue[OutputDelta] = asyncio.Queue()

    def read(self, delta: TokenDelta) -> None:
        for output in self.reader.process(delta):
            self._outputs.put_nowait(output)

    def end(self, reason: str, error: str | None) -> None:
        """The engine will say no more."""
        for output in self.reader.end(reason, error):
            self._outputs.put_nowait(output)

    async def take(self) -> list[OutputDelta]:
        """What has come since the last time, one delta a sample: who reads slowly gets more at a time."""
        deltas = {}
        while not deltas or not self._outputs.empty():
            delta = await self._outputs.get()
            deltas.setdefault(delta.index, []).append(delta)
        return [of_one[0] if len(of_one) == 1 else merge_deltas(of_one) for of_one in deltas.values()]


def read_all(batch: list[tuple[RequestStream, TokenDelta]]) -> None:
    for stream, delta in batch:
        stream.read(delta)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable, *arguments: object) -> None:
    """Has a loop call the function soon, from any thread."""
    with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody left who waits
        loop.call_soon_threadsafe(function, *arguments)
