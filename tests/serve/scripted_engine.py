"""A stand-in for AsyncLLM that does what a test says, for situations that the real one cannot be brought into."""

import asyncio
from collections.abc import AsyncIterator, Callable

from jpaged.config import EngineConfig
from jpaged.detokenizer import Detokenizer
from jpaged.errors import ContextLengthError
from jpaged.metrics import EngineMetrics
from jpaged.outputs import Logprob, OutputDelta
from jpaged.programs import Progress


class ByteTokenizer:
    """One token a byte; 256 begins a text, 257 ends it."""

    vocab_size = 258
    bos_token_id = 256
    eos_token_ids = special_ids = special_token_ids = frozenset({257})
    strips_leading_space = False
    has_chat_template = True

    def encode(self, text, add_special_tokens=True):
        ids = list(text.encode())
        return [256, *ids] if add_special_tokens else ids

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b""

    __getitem__ = token_bytes

    def stream(self, skip_special_tokens=True, is_continuation=False):
        return Detokenizer(self, skip_special_tokens=skip_special_tokens, is_continuation=is_continuation)

    def id_to_token(self, token_id):
        return chr(token_id)

    def check_chat_template(self):
        pass

    def apply_chat_template(self, messages, add_generation_prompt=None, continue_final_message=False, **kwargs):
        if kwargs.get("refuse"):
            raise ValueError("the chat template refused the messages: as it was told to")
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        if continue_final_message:
            return text.removesuffix("\n")
        return text if add_generation_prompt is False else text + "<assistant>"


Script = Callable[[list[int]], AsyncIterator[OutputDelta]]


async def echo(prompt_token_ids: list[int]) -> AsyncIterator[OutputDelta]:
    """The prompt's own bytes, one a delta."""
    ids = [i for i in prompt_token_ids if i < 256]
    for n, token_id in enumerate(ids):
        yield delta(token_id, finish_reason="stop" if n == len(ids) - 1 else None)
        await asyncio.sleep(0)


async def forever(prompt_token_ids: list[int]) -> AsyncIterator[OutputDelta]:
    while True:
        yield delta(ord("a"))
        await asyncio.sleep(0.01)


async def silent(prompt_token_ids: list[int]) -> AsyncIterator[OutputDelta]:
    await asyncio.sleep(3600)
    yield delta(ord("a"))


def delta(token_id: int, finish_reason: str | None = None, **more) -> OutputDelta:
    text = chr(token_id)
    best = Logprob(logprob=-0.1, rank=1, decoded_token="?", token_bytes=b"?")
    chosen = Logprob(logprob=float("-inf"), rank=2, decoded_token=text, token_bytes=text.encode())
    return OutputDelta("", text, [token_id], [{token_id: chosen, 63: best}], finish_reason, num_cached_tokens=1, **more)


class ScriptedEngine:
    """running and closed are the request ids whose stream began and ended."""

    def __init__(self, script: Script = echo, **config):
        self.config = EngineConfig(model="scripted", **config)
        self.tokenizer = ByteTokenizer()
        self.max_model_len = 1000
        self.generation_defaults = {}
        self.metrics = EngineMetrics("scripted")
        self.script = script
        self.progress = Progress(3, 3, is_complete=True)
        self.death: str | None = None
        self.validated = []
        self.running: list[str] = []
        self.closed: list[str] = []

    def validate(self, prompt_token_ids, params):
        self.validated.append((prompt_token_ids, params))
        if len(prompt_token_ids) + (params.max_tokens or 1) > self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(prompt_token_ids)} and {params.max_tokens}."
            )

    async def stream(self, prompt_token_ids, params, request_id):
        self.running.append(request_id)
        try:
            async for item in self.script(prompt_token_ids):
                yield item
        finally:
            self.closed.append(request_id)

    def check_health(self):
        if self.death:
            raise RuntimeError(self.death)

    def shutdown(self):
        pass
