"""EngineProcess: an EngineCore in a process of its own: commands in, token deltas and numbers out.

    python -m jpaged.engine_process FILE_DESCRIPTOR

`EngineClient` starts it and hears from it. It ends when the other end of its channel is closed.
"""

import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict

from jpaged.channel import Channel
from jpaged.config import EngineConfig
from jpaged.engine_core import EngineCore
from jpaged.levels import Levels
from jpaged.outputs import TokenDelta
from jpaged.program_cache import compile_counter
from jpaged.programs import NUM_COMPILE_THREADS
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason
from jpaged.step_metrics import StepStats

logger = logging.getLogger(__name__)


class EngineProcess:
    """Steps the engine, and obeys commands between steps. It is the engine's StepMetrics, too: the client counts."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._inbox: queue.SimpleQueue[tuple[str, list]] = queue.SimpleQueue()
        self._progress_lock = threading.Lock()
        self._num_added = 0  # requests that the engine has been given
        self._stats: StepStats | None = None
        self._cache_config: dict[str, str] = {}
        self._commands = {
            "add": self._add, "abort": self._abort, "stop": self._stop, "reset_prefix_cache": self._reset_prefix_cache,
        }  # fmt: skip

    def load(self, config: EngineConfig) -> None:
        """Loads the model and starts to compile. Raises what EngineCore raises."""
        threading.Thread(target=self._listen, name="jpaged-commands", daemon=True).start()
        self._engine = engine = EngineCore(config, self)
        gc.freeze()  # what was loaded stays for good: the collector need not walk it again and again
        facts = {
            "spec": asdict(engine.spec),
            "vocab_size": engine.model_config.vocab_size,
            "max_position": engine.model_config.max_position,
            "num_usable_blocks": engine.validate.num_usable_blocks,
        }
        self._num_usable_blocks = facts["num_usable_blocks"]
        self._tell_progress()
        self._channel.send("loaded", facts, self._cache_config)
        engine.runner.programs.compile_in_background(NUM_COMPILE_THREADS, self._tell_progress)

    def run(self) -> None:
        """Never returns. Raises what ends the engine."""
        while True:
            self._obey()
            self._say(self._engine.step())
            self._tell_room()

    def set_cache_config(self, **config: object) -> None:
        self._cache_config = {name: str(value) for name, value in config.items()}

    def on_step(self, stats: StepStats) -> None:
        self._stats = stats

    def on_levels(self, levels: Levels) -> None:
        self._channel.send("levels", self._num_added, levels)

    def on_compile(self, phase: str) -> None:
        self._channel.send("compiled", phase)

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._channel.receive())
        except (EOFError, OSError):  # nobody is left who could read an answer, and a compilation cannot be interrupted
            os._exit(0)

    def _obey(self) -> None:
        """Runs the commands that have come; waits for one where the engine has nothing to do."""
        wait = not self._engine.has_work
        while wait or not self._inbox.empty():
            name, arguments = self._inbox.get()
            self._commands[name](*arguments)
            wait = False

    def _say(self, deltas: list[TokenDelta]) -> None:
        stats, self._stats = self._stats, None
        if deltas or stats is not None:
            self._channel.send("step", self._num_added, stats, deltas)

    def _add(self, request_id: str, prompt_token_ids: list[int], params: dict) -> None:
        self._num_added += 1
        try:
            self._engine.add_request(request_id, prompt_token_ids, SamplingParams(**params))
        except ValueError as error:  # the client has validated it; if it was wrong, the other requests go on
            ended = {"finish_reason": FinishReason.ERROR, "error": str(error), "is_bad_request": True}
            num_samples = params["best_of"] or params["n"]
            self._say([TokenDelta(request_id, index, [], time.monotonic(), **ended) for index in range(num_samples)])

    def _abort(self, request_id: str) -> None:
        self._say(self._engine.abort(request_id))

    def _stop(self, request_id: str, index: int) -> None:
        self._engine.stop(request_id, index)

    def _reset_prefix_cache(self, number: int) -> None:
        self._channel.send("answer", number, self._engine.reset_prefix_cache())

    def _tell_room(self) -> None:
        """A prefix that could not be pinned leaves its room to requests."""
        num_usable_blocks = self._engine.validate.num_usable_blocks
        if num_usable_blocks != self._num_usable_blocks:
            self._num_usable_blocks = num_usable_blocks
            self._channel.send("room", num_usable_blocks)

    def _tell_progress(self) -> None:
        with self._progress_lock:  # of several threads, none may tell what was true before the last one told
            self._channel.send("progress", self._engine.runner.programs.progress, compile_counter.num_compiled)


class LogSender(logging.Handler):
    """Gives log records to the other process, whose handlers and formats are the user's."""

    def __init__(self, channel: Channel):
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send("log", record.name, record.levelno, self.format(record))
        except OSError:
            pass  # nobody is left to read it
        except Exception:  # as every handler: a record that cannot be formatted must not end what was going on
            self.handleError(record)


def _in_plain_words(error: Exception) -> tuple[str, list]:
    """The error's class, as far as callers tell them apart, and what to make it of again."""
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", [error.errno, error.strerror, error.filename and str(error.filename)]
    for kind in (OSError, ValueError, NotImplementedError):
        if isinstance(error, kind):
            return kind.__name__, [str(error)]
    return "RuntimeError", ["".join(traceback.format_exception(error))]


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole service: it is the client's to end this
        signal.signal(number, signal.SIG_IGN)
    channel = Channel.of_file(int(sys.argv[1]))
    try:
        _, (config, log_level) = channel.receive()
    except (EOFError, OSError):  # whoever started this has changed its mind
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[LogSender(channel)])
    logging.getLogger("jpaged").setLevel(log_level)
    process = EngineProcess(channel)
    try:
        process.load(EngineConfig(**config))
    except Exception as error:  # the process's last frame: the other one must hear why
        with contextlib.suppress(OSError):
            channel.send("refused", *_in_plain_words(error))
        return 1
    try:
        process.run()
    except Exception as error:  # likewise
        logger.exception("the engine died")
        with contextlib.suppress(OSError):
            channel.send("died", f"the engine died: {error!r}")
    return 1


if __name__ == "__main__":
    exit_status = main()
    os._exit(exit_status)  # an ordinary exit would wait for a compilation
