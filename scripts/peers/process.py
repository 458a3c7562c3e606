"""WorkerProcess: a worker as its parent sees it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

from last_words import last_error, last_line

SECONDS_TO_END = 20
SECONDS_TO_ANSWER = 1800  # nothing takes that long, on a busy machine either: whoever needs more hangs
SECONDS_TO_LOOK = 0.5  # whether the worker lives: where its children hold its pipe, reading does not tell


class WorkerProcess:
    """One engine, in a process group of its own, that sleeps whenever it is not asked something.

    Engines' idle threads may spin, or serve timers; between its runs the whole group is stopped, so that nobody is
    measured beside anybody else. stderr goes to log. Whatever goes wrong with it, a command that cannot be run too, is
    an OSError of one line: "crashed: why; see log".
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path, timeout: float = SECONDS_TO_ANSWER):
        self._log = log
        self.timeout = timeout
        self._unread = b""
        with log.open("w") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=os.environ | env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                raise self._crash(f"it cannot be started: {error}") from error
        os.set_blocking(self._process.stdin.fileno(), False)  # a worker that hangs does not read either

    def wait_until_ready(self) -> str:
        """The worker's own words about its version and settings."""
        settings = self._read(("ready",), time.monotonic() + self.timeout)["ready"]
        self._signal(signal.SIGSTOP)
        return settings

    def ask(self, request: dict, *names: str) -> dict:
        """The answer, which has at least these names."""
        self._signal(signal.SIGCONT)
        end = time.monotonic() + self.timeout
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading tells how
            self._write(json.dumps(request).encode() + b"\n", end)
        answer = self._read(names, end)
        self._signal(signal.SIGSTOP)
        return answer

    def run(self, request: dict) -> float:
        """Seconds. Another number of tokens than was asked for counts as a crash."""
        answer = self.ask(request, "seconds", "num_output_tokens")
        if answer["num_output_tokens"] != request["output_lens"]:
            raise self._crash(f"asked for {request['output_lens']} tokens, got {answer['num_output_tokens']}")
        return answer["seconds"]

    def close(self) -> None:
        """Ends the whole group: some engines' children outlive their parent."""
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _write(self, data: bytes, end: float) -> None:
        while data:
            if select.select([], [self._process.stdin], [], SECONDS_TO_LOOK)[1]:
                data = data[os.write(self._process.stdin.fileno(), data) :]
            elif self._process.poll() is not None:
                return  # reading tells how
            else:
                self._check_time(end)

    def _read(self, names: tuple[str, ...], end: float) -> dict:
        line = self._read_line(end)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not answer.keys() >= set(names):
            raise self._crash(f"its answer was {line.decode(errors='replace').strip()[:200]!r}")
        return answer

    def _read_line(self, end: float) -> bytes:
        while b"\n" not in self._unread:
            has_ended = self._process.poll() is not None
            if select.select([self._process.stdout], [], [], 0 if has_ended else SECONDS_TO_LOOK)[0]:
                data = self._process.stdout.read(1 << 16)
                self._unread += data
                if data:
                    continue
                has_ended = True
            if has_ended:
                raise self._crash(self._how_it_ended())
            self._check_time(end)
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _check_time(self, end: float) -> None:
        if time.monotonic() > end:
            raise self._crash(f"no answer in {self.timeout:g} s, its last words: {last_line(self._log)}")

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"it closed its output, its last words: {last_line(self._log)}"
        if status > 0:
            return f"{last_error(self._log)} (exit status {status})"
        if status == 0:
            return f"it ended without an answer, its last words: {last_line(self._log)}"
        name = signal.Signals(-status).name
        memory = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"killed by {name}{memory}, its last words: {last_line(self._log)}"

    def _crash(self, why: str) -> OSError:
        return OSError(f"crashed: {why}; see {self._log}")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended; whoever reads from it will notice
            os.killpg(self._process.pid, number)
