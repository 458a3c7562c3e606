"""EngineClient: an EngineProcess, started and heard from this process. Loads no jax."""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from jpaged.channel import Channel, frame
from jpaged.config import EngineConfig

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]  # where the other process finds the same jpaged
SHUT_DOWN = "the engine was shut down"
_ERRORS = {kind.__name__: kind for kind in (OSError, ValueError, NotImplementedError, RuntimeError)}


class EngineClient:
    """hear: called with the name and the arguments of each message. on_end: with the reason, when no more can come.
    Both run on a thread of the client's. `send` never waits for the engine.
    """

    def __init__(self, hear: Callable[[str, list], None], on_end: Callable[[str], None]):
        """Starts the process, which has much to import before it can load anything."""
        self._hear, self._on_end = hear, on_end
        self._channel, theirs = Channel.pair()
        command = [sys.executable, "-P", "-m", "jpaged.engine_process", str(theirs.fileno())]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
            env=os.environ | {"PYTHONPATH": path},
        )
        theirs.close()
        self._loaded: Future[list] = Future()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._last_words: str | None = None
        self._threads = [
            threading.Thread(target=work, name=f"jpaged-{work.__name__.strip('_')}", daemon=True)
            for work in (self._listen, self._send_all)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, config: EngineConfig) -> list:
        """Has the engine loaded; returns what it says of itself. Raises ValueError, OSError or NotImplementedError for
        what it cannot load, RuntimeError where it fails."""
        self.send("load", asdict(config), logging.getLogger("jpaged").getEffectiveLevel())
        return self._loaded.result()

    def send(self, name: str, *arguments: object) -> None:
        """Raises TypeError for arguments that are not plain. What is sent after the end is lost."""
        self._outbox.put(frame(name, *arguments))

    def close(self) -> None:
        """Ends the process, whatever it does, and waits until `on_end` has run."""
        self._last_words = SHUT_DOWN
        self._process.kill()
        for thread in self._threads:
            thread.join()

    def _send_all(self) -> None:
        """A thread of its own: an engine that hangs must not hold up whoever has something to say to it."""
        try:
            while message := self._outbox.get():
                self._channel.send_frame(message)
        except OSError:  # `_listen` finds out why
            pass

    def _listen(self) -> None:
        while True:
            try:
                name, arguments = self._channel.receive()
            except (EOFError, OSError):
                break
            try:
                self._take(name, arguments)
            except Exception as error:  # the thread's last frame: without it, nobody would hear of anything any more
                logger.exception("what the engine said could not be taken")
                self._last_words = f"what the engine said could not be taken: {error!r}"
                self._process.kill()
                break
        status = self._process.wait()
        self._outbox.put(b"")
        reason = self._last_words or f"the engine's process has ended: {_describe(status)}"
        if not self._loaded.done():
            self._loaded.set_exception(RuntimeError(reason))
        self._on_end(reason)

    def _take(self, name: str, arguments: list) -> None:
        if name == "loaded":
            self._loaded.set_result(arguments)
        elif name == "refused":
            kind, details = arguments
            self._loaded.set_exception(_ERRORS[kind](*details))
        elif name == "log":
            logger_name, level, text = arguments
            logging.getLogger(logger_name).log(level, "%s", text)
        elif name == "died":
            (self._last_words,) = arguments
        else:
            self._hear(name, arguments)


def _describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
