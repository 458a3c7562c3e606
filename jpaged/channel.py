"""Channel: messages between the engine's process and its reader's, as frames of msgpack over a socket."""

import os
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgpack
import numpy as np


class Channel:
    """One end. A message is a name and plain arguments; tuples, named ones too, arrive as lists.

    Any thread may send; one receives. Both raise EOFError or OSError when the other end is gone.
    """

    def __init__(self, connection: Connection):
        self._connection = connection  # frames are its part; what it could pickle is never asked of it
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        ours, theirs = Pipe()
        return cls(ours), cls(theirs)

    @classmethod
    def of_file(cls, number: int) -> "Channel":
        """From a file descriptor that this process has inherited; those that it starts do not."""
        os.set_inheritable(number, False)
        return cls(Connection(number))

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, name: str, *arguments: object) -> None:
        self.send_frame(frame(name, *arguments))

    def send_frame(self, message: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(message)

    def receive(self) -> tuple[str, list]:
        message = self._connection.recv_bytes()
        name, *arguments = msgpack.unpackb(message, strict_map_key=False, unicode_errors="surrogatepass")
        return name, arguments

    def close(self) -> None:
        self._connection.close()


def frame(name: str, *arguments: object) -> bytes:
    """A message as it is sent. Raises TypeError or OverflowError for what msgpack cannot hold."""
    return msgpack.packb((name, *arguments), default=_plain, unicode_errors="surrogatepass")


def _plain(value: object) -> object:
    """Of numbers of numpy's and of paths, which callers may use for numbers and strings."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r} cannot be sent to another process")
