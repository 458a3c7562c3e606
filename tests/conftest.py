import os
from importlib.util import find_spec
from pathlib import Path

import jaxtyping
import pytest

# Shapes and dtypes of the model's and the sampler's functions are checked while tests run; production runs unchecked.
# Not those of the kernels' dataclasses, which JAX also fills with shapes, specs and placeholders.
# `make test-gpu` runs with whatever packages a chip's own interpreter has: hence the ifs.
if find_spec("beartype"):
    jaxtyping.install_import_hook(
        ["models.attention", "models.layers", "models.llama", "jpaged.sampler"], "beartype.beartype"
    )

if find_spec("hypothesis"):
    from hypothesis import settings

    # A first example also compiles; the suite's own timeout is the limit.
    settings.register_profile("jpaged", deadline=None)
    settings.load_profile("jpaged")


@pytest.fixture(scope="session")
def programs_dir() -> str:
    """Where tests keep compiled programs: a second run of the suite is spared the compiler."""
    return os.environ.get("JPAGED_TEST_CACHE", str(Path(__file__).parent.parent / "build" / "test-programs"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(os.environ.get("JPAGED_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
