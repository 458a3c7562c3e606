"""HttpClient: as much HTTP/1.1 as a load generator needs, and no more.

A connection a request: the clock then covers what a new user waits for, and no idle connection can be closed on us. A
read hands over what the socket had, without a thread or a layer in between that would take the server's cores.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_SIZE = 65536


class ProtocolError(OSError):
    """The server answered something that is no HTTP, or stopped in the middle."""


@dataclass(frozen=True)
class Response:
    """body: chunks of bytes as they come."""

    status: int
    body: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.body])

    async def error(self) -> str:
        """The status and the server's own message, in one line."""
        body = await self.read()
        try:
            message = error_message(json.loads(body))
        except ValueError:
            message = body.decode("utf-8", "replace")
        return " ".join(f"HTTP {self.status}: {message}".split())


def error_message(answer: object) -> str:
    """What OpenAI's form of an error says."""
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


class HttpClient:
    """Requests to one server. Raises ValueError for a base_url that is none, OSError while a request is made."""

    def __init__(self, base_url: str, headers: Mapping[str, str]):
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"a server's URL looks like http://127.0.0.1:8000, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._address = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/")
        self._headers = {"Host": url.netloc.rpartition("@")[2], "Connection": "close", **headers}

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Sends at once; entered when the head of the answer is there. Leaving it closes the connection."""
        try:
            reader, writer = await asyncio.open_connection(*self._address, ssl=self._ssl)
        except OSError as error:
            reason = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror or error  # below: names
            raise ConnectionError(f"cannot connect to {self.base_url}: {reason}") from None
        try:
            headers = self._headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
            fields = (f"{name}: {value}" for name, value in headers.items())
            head = "\r\n".join([f"{method} {self._prefix}{path} HTTP/1.1", *fields, "", ""])
            writer.write(head.encode() + body)
            await writer.drain()
            yield await _read_head(reader)
        finally:
            writer.close()

    async def get_json(self, path: str) -> tuple[int, dict]:
        """The status and the answer, empty where that is no JSON object."""
        async with self.request("GET", path) as response:
            body = await response.read()
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        return response.status, answer if isinstance(answer, dict) else {}


async def _read_head(reader: asyncio.StreamReader) -> Response:
    version, _, rest = (await reader.readline()).partition(b" ")
    status = rest[:3]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise ProtocolError("the connection was closed without an answer" if not version else "the answer is no HTTP")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    if headers.get(b"transfer-encoding") == b"chunked":
        return Response(int(status), _read_chunks(reader))
    length = headers.get(b"content-length")
    return Response(int(status), _read_rest(reader, None if length is None else int(length)))


async def _read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    except (ValueError, asyncio.IncompleteReadError):
        raise ProtocolError("the connection was closed in the middle of the answer") from None


async def _read_rest(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """length: bytes to come; None for all until the connection ends."""
    while length != 0:
        chunk = await reader.read(READ_SIZE if length is None else length)
        if not chunk and length is not None:
            raise ProtocolError("the connection was closed in the middle of the answer")
        if not chunk:
            return
        length = None if length is None else length - len(chunk)
        yield chunk
