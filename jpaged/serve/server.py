"""Server: uvicorn, as we start and stop it."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from jpaged.serve.config import ServeConfig
from jpaged.serve.console import say

KEEP_ALIVE_SECONDS = 30  # over the 5 of httpx: who closes an idle connection first must not be a matter of luck
LAST_WORD_SECONDS = 1  # for what is cancelled to tell its client
POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """A signal is an ordinary end: requests get shutdown_timeout seconds, then their clients hear that it is over.

    Raises OSError for a certificate that cannot be read.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig):
        uvicorn_config = uvicorn.Config(
            app,
            log_config=None,
            access_log=config.access_log,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_WORD_SECONDS,
            lifespan="off",
            ws="none",
        )
        uvicorn_config.load()
        super().__init__(uvicorn_config)
        self._shutdown_timeout = config.shutdown_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signals again: they would become tracebacks or odd statuses."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # who asks once more is not made to wait

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        say("jpaged is stopping")
        for listener in self.servers:
            listener.close()
        requests = self.server_state.tasks
        deadline = time.monotonic() + self._shutdown_timeout
        while requests and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(tuple(requests), timeout=LAST_WORD_SECONDS)
        await super().shutdown(sockets)
