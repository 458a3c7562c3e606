"""A real uvicorn server on a real socket, in a thread of the test process."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from jpaged.serve.app import make_app
from jpaged.serve.config import ServeConfig
from jpaged.serve.listener import listen
from jpaged.serve.loading import EngineLoader
from jpaged.serve.server import Server


@contextlib.contextmanager
def http_server(load: Callable[[], object], **config) -> Iterator[str]:
    """Serves the engine that load() returns; yields the URL. Leaving it stops the server as a signal does."""
    config = ServeConfig(port=0, **config)
    listener, url = listen(config)
    server = Server(make_app(EngineLoader(load), config), config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
