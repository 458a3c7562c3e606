"""Generation: one HTTP request's work in the engine, answered whole or as a stream."""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Send

import jpaged
from jpaged.errors import ContextLengthError, QueueFullError
from jpaged.outputs import OutputDelta, merge_deltas
from jpaged.sampling_params import SamplingParams
from jpaged.serve.answers import Answer
from jpaged.serve.errors import ApiError, caller_errors
from jpaged.serve.protocol import GenerationBody
from jpaged.serve.streaming import WhileConnected, merge, send_events, to_json


class Generation:
    """The engine requests of one HTTP request, one for each prompt, of n choices each.

    Construction checks all of them and raises a 400, or a 500 where the engine is dead.
    """

    def __init__(
        self,
        engine: "jpaged.AsyncLLM",
        answer_class: type[Answer],
        model: str,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        default_max_tokens: int | None,
    ):
        """default_max_tokens: None for as many as the context allows."""
        try:
            engine.check_health()
        except RuntimeError as error:
            raise ApiError(500, str(error)) from error
        self._engine = engine
        self._is_stream = bool(body.stream)
        self._prompts = prompts
        answer_id = answer_class.id_prefix + (body.request_id or uuid.uuid4().hex)
        self._headers = [(b"x-request-id", answer_id.encode("utf-8", "replace"))]
        # two clients may choose one request_id: the engine's ids are unique all the same
        self._engine_id = f"{answer_id}-{uuid.uuid4().hex[:8]}"
        params = body.sampling_params(engine.generation_defaults, max_tokens=default_max_tokens)
        is_default = body.max_tokens is None and params.max_tokens is not None
        self._params = [self._fit(params, prompt) if is_default else params for prompt in prompts]
        for prompt, prompt_params in zip(prompts, self._params, strict=True):
            self._check(prompt, prompt_params, body.prompt_field)
        self._num_choices = params.n * len(prompts)
        self._answer = answer_class(answer_id, model, body, prompts, engine.tokenizer)

    def _check(self, prompt: list[int], params: SamplingParams, prompt_field: str) -> None:
        try:
            with caller_errors():
                self._engine.validate(prompt, params)
        except ApiError as error:
            self._engine.metrics.on_rejected("invalid")
            if isinstance(error.__cause__, ContextLengthError):
                error.param = prompt_field
            raise

    def response(self) -> Response:
        return WhileConnected(self._send_stream if self._is_stream else self._send_whole)

    def _fit(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """A limit that nobody asked for gives way to the context's, but for one token."""
        room = max(self._engine.max_model_len - len(prompt), params.min_tokens, 1)
        return replace(params, max_tokens=min(params.max_tokens, room))

    async def _send_stream(self, send: Send) -> None:
        await send_events(send, self._chunks(), self._headers)

    async def _send_whole(self, send: Send) -> None:
        deltas: list[list[OutputDelta]] = [[] for _ in range(self._num_choices)]
        async with aclosing(self._run()) as run:
            async for index, delta in run:
                deltas[index].append(delta)
        body = to_json(self._answer.whole([merge_deltas(choice) for choice in deltas]))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self._headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _chunks(self) -> AsyncIterator[list[dict]]:
        answer = self._answer
        is_first = True
        async with aclosing(self._run()) as run:
            async for index, delta in run:
                chunks = answer.chunk(index, delta)
                yield answer.opening() + chunks if is_first else chunks
                is_first = False
        yield answer.closing()

    async def _run(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """(index of the choice, delta)"""
        async with aclosing(merge([self._stream(index) for index in range(len(self._prompts))])) as deltas:
            async for prompt, delta in deltas:
                yield prompt * self._params[prompt].n + delta.index, delta

    async def _stream(self, index: int) -> AsyncIterator[OutputDelta]:
        engine_id = f"{self._engine_id}-{index}"
        try:
            async with aclosing(self._engine.stream(self._prompts[index], self._params[index], engine_id)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "error":
                        raise ApiError(400 if delta.is_bad_request else 500, delta.error)
                    yield delta
        except QueueFullError as error:
            self._engine.metrics.on_rejected("queue_full")
            raise ApiError(429, str(error), headers={"Retry-After": "1"}) from error
