"""Starts the server: flags, the socket, then the model while HTTP already answers."""

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jpaged
from jpaged.cli import Parser
from jpaged.config import EngineConfig
from jpaged.serve.app import make_app
from jpaged.serve.config import ServeConfig
from jpaged.serve.console import log_stats, say, set_up_logging, show_warmup
from jpaged.serve.listener import listen
from jpaged.serve.loading import EngineLoader
from jpaged.serve.server import Server

HEALTH_SECONDS = 0.5


def parse_flags(argv: Sequence[str] | None = None) -> tuple[EngineConfig, ServeConfig]:
    """Exits with status 2 and one line for a flag that cannot work."""
    parser = Parser(prog="python -m jpaged.serve", description="An OpenAI-compatible server.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=jpaged.__version__)
    engine_config, config = parser.parse(argv, server=ServeConfig)
    return engine_config, config


async def serve(server: Server, listener: socket.socket, loader: EngineLoader, config: ServeConfig, url: str) -> int:
    """Answers until a signal comes (status 0) or the engine cannot go on (status 1)."""
    attendant = asyncio.create_task(attend(loader, config, url))
    attendant.add_done_callback(lambda _: setattr(server, "should_exit", True))
    await server.serve(sockets=[listener])
    if attendant.done():
        return attendant.result()
    attendant.cancel()
    return 0


async def attend(loader: EngineLoader, config: ServeConfig, url: str) -> int:
    """Follows the engine from loading on; returns the exit status when it cannot go on, and never before."""
    await asyncio.wait([asyncio.wrap_future(loader.future)])
    if error := loader.future.exception():
        if isinstance(error, (ValueError, OSError, NotImplementedError)):
            say(f"error: {_one_line(error)}")
        else:
            say("".join(traceback.format_exception(error)))
        return 1
    engine = loader.engine()
    engine.metrics.prefix = config.metrics_prefix
    helpers = [asyncio.create_task(show_warmup(engine, config, url))]
    if config.log_stats:
        helpers.append(asyncio.create_task(log_stats(engine)))
    try:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            engine.check_health()
    except RuntimeError as error:
        say(f"error: the engine has died: {error}")
        return 1
    finally:
        for helper in helpers:
            helper.cancel()


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def main(argv: Sequence[str] | None = None) -> int:
    engine_config, config = parse_flags(argv)
    set_up_logging(config)
    try:
        listener, url = listen(config)
    except OSError as error:
        say(f"error: cannot listen on {config.uds or f'{config.host}:{config.port}'}: {error.strerror or error}")
        return 1
    say(f"jpaged {jpaged.__version__} listens on {url} and loads {engine_config.model}")
    loader = EngineLoader(lambda: jpaged.AsyncLLM.from_config(engine_config))
    try:
        server = Server(make_app(loader, config), config)
    except OSError as error:
        say(f"error: cannot read {config.ssl_certfile} or {config.ssl_keyfile}: {error.strerror or error}")
        return 1
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        status = runner.run(serve(server, listener, loader, config, url))
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)
    if engine := loader.engine_or_none():
        engine.shutdown()
    return status


if __name__ == "__main__":
    exit_status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)  # an ordinary exit would wait for a model that is being loaded
