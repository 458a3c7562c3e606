import contextlib

import httpx
import pytest
from http_server import http_server
from tiny_model import make_tiny_model

from jpaged.async_llm import AsyncLLM
from jpaged.config import EngineConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def engine(tiny_model):
    """A real engine that compiles a single program: two sequences run, four wait, the pool has 16 usable blocks."""
    engine = AsyncLLM.from_config(
        EngineConfig(
            model=tiny_model,
            served_model_name=("tiny",),
            dtype="float32",
            block_size=16,
            max_num_batched_tokens=2,
            max_num_seqs=2,
            num_blocks_override=17,
            max_num_queued_requests=4,
        )
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
