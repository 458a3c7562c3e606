"""The listening socket: taken before the model is loaded, so that a busy port is known at once."""

import os
import socket
import stat

from jpaged.serve.config import ServeConfig

BACKLOG = 2048
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # what to call to reach it from here


def listen(config: ServeConfig) -> tuple[socket.socket, str]:
    """A listening socket and the URL that reaches it. Raises OSError where somebody else has the port or path."""
    if config.uds is not None:
        _remove_stale(config.uds)
        listener = socket.socket(socket.AF_UNIX)
        address, url = config.uds, f"unix:{config.uds}"
    else:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(BACKLOG)  # now, because two sockets that are only bound to one port do not collide
    if config.uds is None:
        scheme = "https" if config.ssl_certfile else "http"
        host = _EVERY_INTERFACE.get(config.host, config.host)
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}{config.root_path}"
    return listener, url


def _remove_stale(path: str) -> None:
    """A server that was killed leaves its socket behind, and nobody answers there."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(path) != 0:
                os.unlink(path)
