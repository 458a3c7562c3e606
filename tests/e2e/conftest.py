import pytest
from engines import make_engine
from tiny_model import CONFIG, WITH_WINDOW, make_tiny_model


@pytest.fixture(
    scope="module",
    params=[pytest.param(CONFIG, id="tiny"), pytest.param(WITH_WINDOW, id="window", marks=pytest.mark.slow)],
)
def model(request, tmp_path_factory) -> str:
    """A tiny random one, without and with a layer that sees a window; some files have another."""
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    """The plain one: room for all, and nothing shared."""
    engine = make_engine(model, programs_dir, enable_prefix_caching=False)
    yield engine
    engine.close()
