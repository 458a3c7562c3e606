"""HttpClient: requests to the server that is measured, each with a connection of its own."""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx


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
    """Requests to one server. Raises ValueError for a base_url that is none, OSError while a request is made.

    A connection a request: the clock then covers what a new user waits for, and no idle connection can be closed on us.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]):
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"a server's URL looks like http://127.0.0.1:8000, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **headers},
            timeout=None,  # of the caller
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Sends at once; entered when the head of the answer is there. Leaving it closes the connection."""
        try:
            async with self._client.stream(method, path, content=body) as response:
                yield Response(response.status_code, response.aiter_raw())
        except httpx.ConnectError as error:
            raise ConnectionError(f"cannot connect to {self.base_url}: {_system_error(error)}") from None
        except httpx.HTTPError as error:
            raise ProtocolError(str(error) or type(error).__name__) from None

    async def get_json(self, path: str) -> tuple[int, dict]:
        """The status and the answer, empty where that is no JSON object."""
        async with self.request("GET", path) as response:
            body = await response.read()
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        return response.status, answer if isinstance(answer, dict) else {}


def _system_error(error: BaseException) -> str:
    """What the operating system said, which httpx wraps in causes that say less."""
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and (cause.errno or 0) > 0:  # below are those of names
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error)
