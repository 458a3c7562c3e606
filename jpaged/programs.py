"""Programs: one compiled step a bucket, compiled on first use or ahead of it in the background."""

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from jpaged.interrupts import interrupts_let_through

logger = logging.getLogger(__name__)

NUM_COMPILE_THREADS = min(os.cpu_count() or 1, 4)


class Progress(NamedTuple):
    """How far compiling ahead has come. error: one line, why it was given up; then programs are compiled on first use."""

    num_compiled: int = 0
    num_programs: int = 0
    is_complete: bool = False
    error: str | None = None


class Programs:
    """A table of programs by bucket. Threads may ask at once: each program is compiled once, others wait for it.

    on_compiled is told for each program whether a step asked for it first ("serving") or not ("warmup"). A step that
    asks for one after the warm-up is logged with the reason; where the table `is_sealed` it is refused.
    """

    def __init__(
        self, compile_program: Callable[[Hashable], Callable], keys: list[Hashable], on_compiled: Callable[[str], None]
    ):
        self._compile = compile_program
        self._on_compiled = on_compiled
        self._on_progress: Callable[[], None] = lambda: None
        self.keys = keys
        self._futures: dict[Hashable, Future] = {}
        self._ready: set[Hashable] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.is_sealed = False  # tests set it: then nothing may be late
        self.error: BaseException | None = None  # why the background gave up

    def __getitem__(self, key: Hashable) -> Callable:
        """The program for key, compiled now if nobody did; raises what the compiler raised.

        It is compiled in a thread of its own: an interrupt ends the waiting alone, and who asks again finds the program.
        """
        if key in self._ready:
            return self._futures[key].result()
        threads = ThreadPoolExecutor(1, "jpaged-compile")
        program = threads.submit(self._get, key, "serving")
        threads.shutdown(wait=False)
        with interrupts_let_through():
            return program.result()

    def _get(self, key: Hashable, phase: str) -> Callable:
        with self._lock:
            future = self._futures.get(key)
            is_mine = future is None
            if is_mine:
                future = self._futures[key] = Future()
        if is_mine:
            try:
                lateness = self._why_late() if phase == "serving" else None
                start = time.monotonic()
                assert not (lateness and self.is_sealed), f"a step needs program {key}: {lateness}"
                program = self._compile(key)
            except BaseException as error:
                with self._lock:
                    del self._futures[key]  # the next caller tries again
                future.set_exception(error)
                raise
            self._ready.add(key)
            future.set_result(program)
            self._on_compiled(phase)
            self._on_progress()
            if lateness:
                logger.warning("a step waited %.1f s for program %s: %s", time.monotonic() - start, key, lateness)
        return future.result()

    def _why_late(self) -> str | None:
        """Why a program is absent after the warm-up; None where there was none, or it is not over."""
        if self.is_complete:
            return f"it is none of the {len(self.keys)} that were compiled ahead"
        if self.error is not None:
            return f"compiling ahead was given up ({self.error!r})"
        return None

    @property
    def num_compiled(self) -> int:
        return len(self._ready)

    @property
    def is_complete(self) -> bool:
        """Whether every program of `keys` is there."""
        return self._ready.issuperset(self.keys)

    @property
    def progress(self) -> Progress:
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}".splitlines()[0]
        return Progress(self.num_compiled, len(self.keys), self.is_complete, error)

    def prepare(self, key: Hashable) -> None:
        """Compiles a program ahead of its use."""
        self._get(key, "warmup")

    def prepare_all(self) -> Iterator[None]:
        """Compiles all of `keys` ahead, several at a time; yields once for each, in order. Raises what the compiler raised."""
        with ThreadPoolExecutor(NUM_COMPILE_THREADS) as threads:
            yield from threads.map(self.prepare, self.keys)

    def compile_all(self) -> None:
        """Compiles what is missing, in order, until it is done or `close` is called."""
        self._compile_each(iter(self.keys))

    def compile_in_background(self, num_threads: int = 1, on_progress: Callable[[], None] = lambda: None) -> None:
        """Starts threads that do `compile_all` together. What they cannot compile is logged and left to first use.

        on_progress is called from now on, by any thread, after each program and where they give up.
        """
        self._on_progress = on_progress
        keys = iter(self.keys)  # shared: each thread takes the next

        def work():
            try:
                self._compile_each(keys)
            except Exception as error:  # the thread's last frame: a step that needs the program will raise it again
                self.error = error
                logger.exception("compiling ahead failed; programs are compiled on first use instead")
                on_progress()

        self._threads = [threading.Thread(target=work, name="jpaged-compile", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops compiling ahead, after the programs in hand."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _compile_each(self, keys: Iterator[Hashable]) -> None:
        for key in keys:
            if self._stopping.is_set():
                return
            self.prepare(key)
