"""ServerProcess: a server of our own for the time of a benchmark."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

POLL_SECONDS = 0.05
STOP_SECONDS = 10
QUIET = ("--port", "0", "--no-access-log", "--disable-log-stats")  # before the user's flags, which win


class ServerProcess:
    """`python -m jpaged.serve` with these flags; entered when it listens, at `url`, and stopped on leaving.

    It does not survive the benchmark, and what it writes goes to a temporary file: `check` quotes it. Raises
    RuntimeError for a server that does not start.
    """

    def __init__(self, flags: Sequence[str]):
        self._log = tempfile.NamedTemporaryFile("r", prefix="jpaged-bench-server-", suffix=".log")
        with open(self._log.name, "w") as stderr:
            command = [sys.executable, "-m", "jpaged.serve", *QUIET, *flags]
            self._process = subprocess.Popen(command, stdout=stderr, stderr=stderr)
        self.url = ""

    def __enter__(self) -> Self:
        try:
            while not (found := re.search(r"listens on (\S+)", self._printed())):
                self.check()
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.url = found[1]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def check(self, patience: float = 0.0) -> None:
        """Raises RuntimeError with the server's last error line where it has ended, or does within patience seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(patience)
            lines = self._printed().splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines or ["it printed nothing"]
            raise RuntimeError(f"the server ended with status {status}: {errors[-1]}")

    def _printed(self) -> str:
        self._log.seek(0)
        return self._log.read()
