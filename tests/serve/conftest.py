import contextlib

import httpx
import pytest
from engines import make_small_async_engine
from http_server import http_server
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def engine(tiny_model, programs_dir):
    """A real engine: two sequences run, four wait, the pool has 16 usable blocks."""
    engine = make_small_async_engine(
        tiny_model, num_blocks_override=17, max_num_queued_requests=4, compilation_cache_dir=programs_dir
    )
    yield engine
    engine.shutdown()


@pytest.fixture
def serve():
    """serve(engine, **ServeConfig fields) -> an httpx client of a server that lives as long as the test."""
    with contextlib.ExitStack() as stack:

        def start(engine, **config) -> httpx.Client:
            url = stack.enter_context(http_server(lambda: engine, **config))
            return stack.enter_context(httpx.Client(base_url=url, timeout=10))

        yield start
