"""AsyncLLM: the engine on a thread of its own, and asyncio streams of its deltas."""

import asyncio
import gc
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from jpaged.config import DEFAULT_MODEL, EngineConfig
from jpaged.engine import LLMEngine
from jpaged.errors import QueueFullError
from jpaged.output_processor import RequestOutputBuilder
from jpaged.outputs import OutputDelta, RequestOutput
from jpaged.programs import NUM_COMPILE_THREADS
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason

logger = logging.getLogger(__name__)


class AsyncLLM:
    """The server's door: many callers on event loops, one engine.

    Callers only put commands into an inbox and take deltas out of a queue of their own; the engine is touched by its
    thread alone. model is what --model takes; further arguments are EngineConfig's fields.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_config: Any):
        self._start(EngineConfig(model=model, **engine_config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "AsyncLLM":
        """Loads the model (blocking), then starts the engine thread and compilation in the background."""
        self = cls.__new__(cls)
        self._start(config)
        return self

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        self._engine = LLMEngine(config)
        self.tokenizer = self._engine.tokenizer
        self.model_config = self._engine.model_config
        self.max_model_len = self._engine.max_model_len
        self.generation_defaults = self._engine.generation_defaults
        self.metrics = self._engine.metrics
        self._inbox: queue.SimpleQueue[Callable[[], list[OutputDelta]]] = queue.SimpleQueue()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[OutputDelta], int]] = {}
        self._answers: set[Future] = set()  # that somebody waits for
        self._stopping = False
        self._death: str | None = None
        gc.freeze()  # what was loaded stays for good: the collector need not walk it again and again
        self._engine.runner.programs.compile_in_background(num_threads=NUM_COMPILE_THREADS)
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises ValueError, one line, for a request that can never be served."""
        self._engine.validate(prompt_token_ids, params)

    async def stream(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[OutputDelta]:
        """The request's deltas as they come; closing or cancelling the stream aborts the request.

        Raises ValueError or QueueFullError before the first delta, RuntimeError when the engine is dead.
        """
        self.check_health()
        self.validate(prompt_token_ids, params)
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        self._check_queue()
        deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._streams[request_id] = asyncio.get_running_loop(), deltas, params.n
        self._inbox.put(lambda: self._add(request_id, prompt_token_ids, params))
        num_open = params.n
        try:
            while num_open:
                delta = await deltas.get()
                num_open -= delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request_id]
            if num_open:
                self.abort(request_id)

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """As `stream`, but each item is the whole output so far (one object that grows)."""
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        builder = RequestOutputBuilder(request_id, text, ids, params.n)
        async for delta in self.stream(ids, params, request_id):
            yield builder.add(delta)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; one that is unknown or has ended is left alone."""
        self._inbox.put(lambda: self._engine.abort(request_id))

    async def reset_prefix_cache(self) -> bool:
        """As LLM's. Raises RuntimeError when the engine is dead."""
        answer: Future[bool] = Future()

        def reset() -> list[OutputDelta]:
            answer.set_result(self._engine.kv.reset_prefix_cache())
            return []

        self._answers.add(answer)
        try:
            self._inbox.put(reset)
            self.check_health()
            return await asyncio.wrap_future(answer)
        finally:
            self._answers.discard(answer)

    def warmup_progress(self) -> tuple[int, int]:
        """(programs compiled, programs in all)."""
        programs = self._engine.runner.programs
        return programs.num_compiled, len(programs.keys)

    def warmup_error(self) -> str | None:
        """Why compiling ahead was given up, if it was: then programs are compiled on first use."""
        error = self._engine.runner.programs.error
        return None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def is_ready(self) -> bool:
        """Whether every program is compiled. Requests are served before that, too."""
        return self._engine.runner.programs.is_complete

    def check_health(self) -> None:
        """Raises RuntimeError with the reason when the engine thread is gone."""
        if self._death is not None:
            raise RuntimeError(self._death)

    def shutdown(self) -> None:
        """Aborts what runs, and ends the engine thread and the compilation after what they have in hand."""
        self._stopping = True
        self._inbox.put(list)
        self._thread.join()
        self._engine.close()

    def _check_queue(self) -> None:
        """The limit counts those that must wait: not those that an engine with room will start in its next step."""
        limit, scheduler = self.config.max_num_queued_requests, self._engine.scheduler
        num_waiting = len(scheduler.waiting)
        num_idle_rows = 0 if num_waiting else self.config.max_num_seqs - len(scheduler.running)
        num_waiting += self._inbox.qsize() - num_idle_rows
        if limit is not None and num_waiting >= limit:
            raise QueueFullError(f"{num_waiting} requests are waiting; the limit is {limit}")

    def _add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> list[OutputDelta]:
        try:
            self._engine.add_request(request_id, prompt_token_ids, params)
        except ValueError as error:  # validated before, so this is a duplicate id that another loop put in first
            return _last_deltas(request_id, params.n, FinishReason.ERROR, str(error))
        return []

    def _run(self) -> None:
        try:
            while not self._stopping:
                deltas = self._obey()
                deltas += self._engine.step()
                self._deliver(deltas)
            self._die("the engine was shut down", FinishReason.ABORT)
        except Exception as error:  # the thread's last frame: nobody else could tell the callers
            logger.exception("the engine thread died")
            self._die(f"the engine died: {error!r}", FinishReason.ERROR)

    def _obey(self) -> list[OutputDelta]:
        """Runs the inbox's commands; waits for one where the engine has nothing to do."""
        deltas = []
        wait = not self._engine.has_work
        while wait or not self._inbox.empty():
            deltas += self._inbox.get()()
            wait = False
        return deltas

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        """Wakes each event loop once, with all that is for it."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, OutputDelta]]] = {}
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                by_loop.setdefault(stream[0], []).append((stream[1], delta))
        for loop, batch in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, batch)

    def _die(self, reason: str, finish_reason: str) -> None:
        self._death = reason
        for answer in list(self._answers):
            if not answer.done():
                answer.set_exception(RuntimeError(reason))
        error = reason if finish_reason == FinishReason.ERROR else None
        self._deliver(
            [
                delta
                for request_id, (_, _, n) in list(self._streams.items())
                for delta in _last_deltas(request_id, n, finish_reason, error)
            ]
        )


def _last_deltas(request_id: str, n: int, finish_reason: str, error: str | None) -> list[OutputDelta]:
    """Those of a request whose samples end without a token more."""
    return [
        OutputDelta(request_id, "", [], finish_reason=finish_reason, error=error, index=index) for index in range(n)
    ]


def _put_all(batch: list[tuple[asyncio.Queue, OutputDelta]]) -> None:
    for deltas, delta in batch:
        deltas.put_nowait(delta)
