"""Answers: what the engine's deltas look like to an OpenAI client, whole or in chunks."""

import time
from collections.abc import Sequence
from typing import ClassVar

import jpaged
from jpaged.outputs import OutputDelta
from jpaged.serve.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from jpaged.serve.protocol import GenerationBody
from jpaged.serve.text_offsets import TextOffsets


class Answer:
    """The answer to one HTTP request, of n choices for each prompt; choice i belongs to prompt i // n.

    Either whole() once, with the merged delta of every choice, or opening(), chunk() for each delta, and closing().
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        answer_id: str,
        model: str,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        tokenizer: "jpaged.tokenizer.Tokenizer",
    ):
        options = body.stream_options
        self._body = body
        self._prompts = prompts
        self._n = body.n or 1
        self._tokenizer = tokenizer
        self._num_logprobs = body.num_logprobs()
        self._has_usage_chunk = bool(options and options.include_usage)
        self._has_usage_always = bool(options and options.continuous_usage_stats)
        self._num_tokens = 0
        self._num_cached = [0] * len(prompts)
        self._head = {"id": answer_id, "object": self.chunk_object, "created": int(time.time()), "model": model}

    def whole(self, deltas: Sequence[OutputDelta]) -> dict:
        for index, delta in enumerate(deltas):
            self._count(index, delta)
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return self._head | {"object": self.object, "choices": choices, "usage": self._usage()}

    def opening(self) -> list[dict]:
        return []

    def chunk(self, index: int, delta: OutputDelta) -> list[dict]:
        """The chunks that this delta is worth: none where a client would see nothing new."""
        self._count(index, delta)
        is_silent = not delta.text and delta.finish_reason is None
        if is_silent and self._num_logprobs is None and not self._body.return_token_ids:
            return []
        return [self._chunk([self._choice(index, delta, is_chunk=True)])]

    def closing(self) -> list[dict]:
        return [self._head | {"choices": [], "usage": self._usage()}] if self._has_usage_chunk else []

    def _chunk(self, choices: list[dict]) -> dict:
        chunk = self._head | {"choices": choices}
        if self._has_usage_always:
            chunk["usage"] = self._usage()
        elif self._has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, delta: OutputDelta, *, is_chunk: bool = False) -> dict:
        raise NotImplementedError

    def _count(self, index: int, delta: OutputDelta) -> None:
        self._num_tokens += len(delta.token_ids) + delta.num_dropped_tokens
        prompt = index // self._n
        self._num_cached[prompt] = max(self._num_cached[prompt], delta.num_cached_tokens)

    def _usage(self) -> dict:
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }


class CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(self, *args):
        super().__init__(*args)
        num_choices = len(self._prompts) * self._n
        self._text_offsets: list[TextOffsets | None] = [None] * num_choices  # of choices that have begun
        self._prompt_logprobs: list[list] = [[] for _ in self._prompts]  # they come with a prompt's first delta

    def _choice(self, index: int, delta: OutputDelta, *, is_chunk: bool = False) -> dict:
        prompt, is_first = index // self._n, self._text_offsets[index] is None
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        echoed = self._prompt_text(prompt) if is_first and self._body.echo else ""
        if is_first:
            self._text_offsets[index] = self._offsets(start=len(echoed), is_continuation=True)
        logprobs = None
        if self._num_logprobs is not None:
            positions, first_token = delta.logprobs or [], None
            offsets = [self._text_offsets[index].next(next(iter(position))) for position in positions]
            if is_first and self._body.echo:
                positions = self._prompt_logprobs[prompt][1:] + positions
                first_token = self._tokenizer.decoded_token(self._prompts[prompt][0])
                offsets = self._prompt_offsets(prompt) + offsets
            logprobs = completion_logprobs(positions, self._num_logprobs, offsets, first_token)
        choice = {
            "index": index,
            "text": echoed + delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompts[prompt]
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs[prompt])
        return choice

    def _prompt_text(self, number: int) -> str:
        prompt = self._body.prompts()[number]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._skips_special_tokens)

    def _prompt_offsets(self, number: int) -> list[int]:
        """Of an echoed prompt, which is shown as it came: as text or as what its ids say."""
        prompt = self._body.prompts()[number]
        if isinstance(prompt, str):
            return self._tokenizer.text_offsets(prompt, self._body.add_special_tokens is not False)
        return list(map(self._offsets(start=0, is_continuation=False).next, prompt))

    def _offsets(self, *, start: int, is_continuation: bool) -> TextOffsets:
        return TextOffsets(
            self._tokenizer,
            skip_special_tokens=self._skips_special_tokens,
            start=start,
            is_continuation=is_continuation,
        )

    @property
    def _skips_special_tokens(self) -> bool:
        return self._body.skip_special_tokens is not False


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, deltas: Sequence[OutputDelta]) -> dict:
        answer = super().whole(deltas)
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs or [])
        return answer | {"prompt_token_ids": self._prompts[0]} if self._body.return_token_ids else answer

    def opening(self) -> list[dict]:
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(self._n)
        ]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._prompts[0]
        return chunks

    def _choice(self, index: int, delta: OutputDelta, *, is_chunk: bool = False) -> dict:
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs or (), self._num_logprobs)
        said = (
            {"delta": {"content": delta.text}}
            if is_chunk
            else {"message": {"role": "assistant", "content": delta.text}}
        )
        choice = {"index": index} | said | {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
