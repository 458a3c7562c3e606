"""Prompts: from what a client may send to token ids."""

import asyncio
import functools
from collections.abc import Callable

import jpaged
from jpaged.serve.errors import bad_request, caller_errors, context_length_exceeded
from jpaged.serve.protocol import ChatFields, CompletionBody

MANY_CHARACTERS = 20_000  # about 5 ms of tokenizing: more would hold up the other requests' tokens
RESERVED_TEMPLATE_KWARGS = frozenset({"self", "messages", "add_generation_prompt", "continue_final_message"})


async def completion_prompts(engine: "jpaged.AsyncLLM", body: CompletionBody) -> list[list[int]]:
    """The token ids of each choice's prompt; special tokens are added to text unless the body says no."""
    add_special_tokens = body.add_special_tokens is not False
    return [
        prompt if isinstance(prompt, list) else await encode(engine, prompt, add_special_tokens, "prompt")
        for prompt in body.prompts()
    ]


async def chat_prompt(engine: "jpaged.AsyncLLM", body: ChatFields, add_special_tokens: bool | None) -> list[int]:
    """The token ids of the rendered chat template, which brings its own special tokens.

    Raises a 400 for what the template refuses.
    """
    messages = body.messages_for_template()
    kwargs = body.chat_template_kwargs or {}
    if clash := RESERVED_TEMPLATE_KWARGS & kwargs.keys():
        raise bad_request(f"chat_template_kwargs must not hold {min(clash)!r}", "chat_template_kwargs")
    with caller_errors():
        engine.tokenizer.check_chat_template()  # the model's fault, and no field's
    with caller_errors("messages"):
        text = await _aside(
            sum(len(message["content"]) for message in messages),
            lambda: engine.tokenizer.apply_chat_template(
                messages, body.add_generation_prompt, bool(body.continue_final_message), **kwargs
            ),
        )
    return await encode(engine, text, bool(add_special_tokens), "messages")


async def encode(engine: "jpaged.AsyncLLM", text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Raises a 400 for text that cannot fit, before the tokenizer spends seconds and gigabytes on it."""
    num_bytes, limit = len(text.encode("utf-8", "replace")), engine.max_model_len * _max_token_bytes(engine.tokenizer)
    if num_bytes > limit:
        raise context_length_exceeded(
            f"This model's maximum context length is {engine.max_model_len} tokens, which hold {limit} bytes of text at "
            f"most. However, {param} has {num_bytes}.",
            param,
        )
    with caller_errors(param):
        return await _aside(len(text), lambda: engine.tokenizer.encode(text, add_special_tokens))


@functools.lru_cache(maxsize=4)
def _max_token_bytes(tokenizer: "jpaged.tokenizer.Tokenizer") -> int:
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


async def _aside[T](num_characters: int, function: Callable[[], T]) -> T:
    """Calls function here, or in a thread where it would take long."""
    return function() if num_characters < MANY_CHARACTERS else await asyncio.to_thread(function)
