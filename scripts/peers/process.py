"""WorkerProcess: a worker as its parent sees it."""

import json
import os
import signal
import subprocess
from pathlib import Path

SECONDS_TO_END = 20


class WorkerProcess:
    """One engine, in a process group of its own, that sleeps whenever it is not asked something.

    Engines' idle threads may spin, or serve timers; between its runs the whole group is stopped, so that nobody is
    measured beside anybody else. stderr goes to log.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path):
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env=os.environ | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self) -> str:
        """The worker's own words about its version and settings. Raises OSError, one line, if it does not start."""
        settings = self._read()["ready"]
        self._signal(signal.SIGSTOP)
        return settings

    def ask(self, request: dict) -> dict:
        """Raises OSError, one line, if the worker ends instead of answering."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def run(self, request: dict) -> float:
        """Seconds. Raises OSError too for another number of tokens than was asked for."""
        answer = self.ask(request)
        if answer["num_output_tokens"] != request["output_lens"]:
            counts = f"asked for {request['output_lens']} tokens, got {answer['num_output_tokens']}"
            raise OSError(f"{counts}: see {self._log}")
        return answer["seconds"]

    def close(self) -> None:
        """Ends the whole group: some engines' children outlive their parent."""
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the worker ended: see {self._log}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # it has ended; whoever reads from it will notice
