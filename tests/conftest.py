import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def programs_dir() -> str:
    """Where tests keep compiled programs: a second run of the suite is spared the compiler."""
    return os.environ.get("JPAGED_TEST_CACHE", str(Path(__file__).parent.parent / "build" / "test-programs"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(os.environ.get("JPAGED_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
