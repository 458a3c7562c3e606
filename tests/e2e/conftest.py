import pytest
from engines import make_engine
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny random one; some files have another."""
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    """The plain one: room for all, and nothing shared."""
    engine = make_engine(model, programs_dir, enable_prefix_caching=False)
    yield engine
    engine.close()
