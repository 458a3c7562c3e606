"""AsyncLLM: asyncio streams of text over an engine in a process of its own."""

import asyncio
import contextlib
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from jpaged.cache_spec import CacheSpec
from jpaged.config import DEFAULT_MODEL, EngineConfig
from jpaged.engine_client import SHUT_DOWN, EngineClient
from jpaged.errors import QueueFullError
from jpaged.interrupts import InterruptsHeldBack, interrupts_let_through
from jpaged.levels import Levels
from jpaged.metrics import EngineMetrics
from jpaged.model_files import ModelFiles, warn_of_chat_template
from jpaged.output_processor import OutputProcessor, RequestOutputBuilder
from jpaged.outputs import OutputDelta, RequestOutput, TokenDelta
from jpaged.programs import Progress
from jpaged.prompts import read_prompt
from jpaged.request_check import RequestCheck
from jpaged.request_stream import RequestStream, call_on, read_all
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason
from jpaged.step_metrics import StepStats


class AsyncLLM:
    """The server's door: many callers on event loops, and one engine, which has a process of its own.

    What is not for the device is done here, on the loop of whoever streams: text, stop strings, log-probs' tokens,
    ranks and metrics. model is what --model takes; further arguments are EngineConfig's fields. progress says how far
    compiling ahead has come: requests are served before it is complete, too. Raises ValueError, OSError or
    NotImplementedError for what cannot be loaded.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_config: Any):
        self._start(EngineConfig(model=model, **engine_config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "AsyncLLM":
        """Loads the model (blocking), and has its programs compiled in the background."""
        self = cls.__new__(cls)
        self._start(config)
        return self

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        self.metrics = EngineMetrics.of(config)
        self.progress = Progress()
        self.num_xla_compilations = 0  # of the engine's process, other programs included
        self._streams: dict[str, RequestStream] = {}  # by the engine's ids
        self._engine_ids: dict[str, str] = {}  # by the callers'
        self._answers: dict[int, Future] = {}  # that somebody waits for
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # for what follows: several event loops may stream
        self._num_added = self._num_seen = 0  # requests that the engine was told of, and those that its levels know of
        self._death: str | None = None
        self._hears = {
            "step": self._on_step, "levels": self._on_levels, "compiled": self.metrics.on_compile,
            "progress": self._on_progress, "answer": self._on_answer, "room": self._on_room,
        }  # fmt: skip
        with InterruptsHeldBack():  # one between the process's start and what ends it would leave it behind
            self._engine = EngineClient(lambda name, arguments: self._hears[name](*arguments), self._die)
            try:
                with interrupts_let_through():
                    _, self.tokenizer, self.generation_defaults = ModelFiles.open(config)
                    warn_of_chat_template(self.tokenizer)
                    facts, cache_config = self._engine.load(config)
            except BaseException:
                self._engine.close()
                raise
        self.metrics.set_cache_config(**cache_config)
        spec = CacheSpec(**facts["spec"] | {"windows": tuple(facts["spec"]["windows"])})
        check = RequestCheck.of(
            config, spec, self.tokenizer, vocab_size=facts["vocab_size"], max_position=facts["max_position"]
        )
        self._check = replace(check, num_usable_blocks=facts["num_usable_blocks"])
        gc.freeze()  # what was loaded stays for good: the collector need not walk it again and again

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises ValueError, one line, for a request that can never be served."""
        self._check(prompt_token_ids, params)
        if params.logits_processors:
            raise ValueError("logits_processors cannot go to the engine's process: LLM has its engine in this one")

    async def stream(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[OutputDelta]:
        """The request's deltas as they come, those that came since the reader last asked as one; closing or cancelling
        the stream aborts the request.

        Raises ValueError or QueueFullError before the first delta, RuntimeError when the engine is dead.
        """
        self.check_health()
        self.validate(prompt_token_ids, params)
        # what the engine has still to say of an aborted request must not reach a later one of the same id
        engine_id = f"{request_id}#{next(self._numbers)}"
        reader = OutputProcessor(
            request_id, len(prompt_token_ids), params, self.tokenizer, self.metrics,
            lambda index: self._engine.send("stop", engine_id, index),
        )  # fmt: skip
        stream, num_open = RequestStream(asyncio.get_running_loop(), reader), params.n
        with self._registered(request_id, engine_id, stream):
            self._add(engine_id, prompt_token_ids, params)
            try:
                self.check_health()  # again: whoever ends the streams of a dead engine may have missed this one
                while num_open:
                    for delta in await stream.take():
                        num_open -= delta.finish_reason is not None
                        yield delta
            finally:
                if not reader.is_finished:
                    self._engine.send("abort", engine_id)
                    reader.end(FinishReason.ABORT)

    @contextlib.contextmanager
    def _registered(self, request_id: str, engine_id: str, stream: RequestStream) -> Iterator[None]:
        if self._engine_ids.setdefault(request_id, engine_id) != engine_id:
            raise ValueError(f"request id {request_id!r} is in use")
        self._streams[engine_id] = stream
        try:
            yield
        finally:
            del self._engine_ids[request_id], self._streams[engine_id]

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        """As `stream`, but of a prompt in any form that LLM.generate takes, and each item is the whole output so far
        (one object that grows)."""
        text, ids = read_prompt(prompt, self.tokenizer.encode)
        builder = RequestOutputBuilder(request_id, text, ids, params.n)
        async with contextlib.aclosing(self.stream(ids, params, request_id)) as deltas:
            async for delta in deltas:
                yield builder.add(delta)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; one that is unknown or has ended is left alone."""
        if (engine_id := self._engine_ids.get(request_id)) is not None:
            self._engine.send("abort", engine_id)

    async def reset_prefix_cache(self) -> bool:
        """As LLM's. Raises RuntimeError when the engine is dead."""
        number, answer = next(self._numbers), Future()
        self._answers[number] = answer
        try:
            self._engine.send("reset_prefix_cache", number)
            self.check_health()
            return await asyncio.wrap_future(answer)
        finally:
            del self._answers[number]

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._engine.pid

    @property
    def max_model_len(self) -> int:
        """How long a request may be, output included."""
        return self._check.max_model_len

    def check_health(self) -> None:
        """Raises RuntimeError with the reason when the engine's process is gone."""
        if self._death is not None:
            raise RuntimeError(self._death)

    def shutdown(self) -> None:
        """Ends the engine's process and aborts what runs."""
        self._engine.close()

    def _add(self, engine_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises QueueFullError. The limit counts those that must wait: not those that an engine with room starts in
        its next step."""
        limit = self.config.max_num_queued_requests
        with self._lock:
            levels = self.metrics.levels
            num_idle_rows = 0 if levels.num_waiting else self.config.max_num_seqs - levels.num_running
            num_waiting = levels.num_waiting + self._num_added - self._num_seen - num_idle_rows
            if limit is not None and num_waiting >= limit:
                raise QueueFullError(f"{num_waiting} requests are waiting; the limit is {limit}")
            self._engine.send("add", engine_id, prompt_token_ids, asdict(params))
            self._num_added += 1

    def _on_step(self, num_added: int, stats: list | None, deltas: list[list]) -> None:
        if stats is not None:
            levels, *numbers = stats
            with self._lock:
                self._num_seen = num_added
                self.metrics.on_step(StepStats(Levels(*levels), *numbers))
        self._deliver([TokenDelta(*delta) for delta in deltas])

    def _on_levels(self, num_added: int, levels: list) -> None:
        with self._lock:
            self._num_seen = num_added
            self.metrics.on_levels(Levels(*levels))

    def _on_progress(self, progress: list, num_xla_compilations: int) -> None:
        self.progress, self.num_xla_compilations = Progress(*progress), num_xla_compilations

    def _on_room(self, num_usable_blocks: int) -> None:
        self._check = replace(self._check, num_usable_blocks=num_usable_blocks)

    def _on_answer(self, number: int, value: bool) -> None:
        answer = self._answers.get(number)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(value)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        """Wakes each event loop once, with all that is for it."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, TokenDelta]]] = {}
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, batch in by_loop.items():
            call_on(loop, read_all, batch)

    def _die(self, reason: str) -> None:
        """After the last message: everybody who waits hears that no more will come."""
        self._death = reason
        is_failure = reason != SHUT_DOWN
        for answer in list(self._answers.values()):
            if not answer.done() and answer.set_running_or_notify_cancel():
                answer.set_exception(RuntimeError(reason))
        ending = (FinishReason.ERROR, reason) if is_failure else (FinishReason.ABORT, None)
        for stream in list(self._streams.values()):
            call_on(stream.loop, stream.end, *ending)
