import pytest
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def engine_flags(tiny_model, programs_dir) -> list[str]:
    """Of an engine that compiles a single program."""
    return [
        "--model", tiny_model, "--dtype", "float32", "--max-num-batched-tokens", "2", "--max-num-seqs", "2",
        "--num-blocks-override", "33", "--block-size", "16", "--compilation-cache-dir", programs_dir,
    ]  # fmt: skip
