"""Who may come in, and with how much: API keys and the size of a body."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serve.errors import ApiError, bad_request
from jpaged.serve.streaming import json_response

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""What probes and scrapers ask for, which bring no key."""


class ApiKeys:
    """ASGI middleware: 401 for a request without one of the keys as its bearer token."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "an API key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"})
        await json_response(error.body(), error.status, error.headers)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        digest = _digest(token.strip())
        # every key is compared, and digests of one length: the time says nothing of the keys
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_body(request: Request, max_size: int) -> bytes:
    """The whole body of a JSON request.

    Raises a 413 as soon as it is known to be over max_size bytes, a 400 for another type of content.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # a browser may send a form to another site's server unasked, never JSON
    if kind != "application/json" and not kind.endswith("+json"):
        raise bad_request(f"Content-Type must be application/json, got {kind}")
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise bad_request(f"Content-Encoding {encoding} is not supported")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_size:
        raise _too_large(f"{declared} bytes", max_size)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_size:
                raise _too_large(f"over {max_size} bytes", max_size)
    except ClientDisconnect:
        raise bad_request("the client went away before its body was whole") from None
    return bytes(body)


def _too_large(size: str, max_size: int) -> ApiError:
    return ApiError(
        413, f"the body has {size}, the limit is {max_size} (--max-body-size)", headers={"Connection": "close"}
    )
