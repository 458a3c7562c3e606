"""What clients of OpenAI and vLLM may send and this server cannot do.

A value that asks for nothing is accepted, any other is refused by name.
"""

from collections.abc import Mapping

from jpaged.serve.errors import bad_request, shown

LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields for a provider's books: they never change an answer, so any value passes."""

SAMPLING = {
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
COMPLETION = SAMPLING | {"suffix": ("",), "prompt_embeds": ()}
CHAT = SAMPLING | {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools there is nothing to choose
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
MESSAGE = {
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
}
STREAM_OPTIONS = {"include_obfuscation": (False,)}
TOKENIZE = {"tools": ([],), "chat_template": (), "mm_processor_kwargs": ({},)}
"""field -> the values beside null that ask for nothing."""


def refuse_unsupported(fields: Mapping[str, object], neutral: Mapping[str, tuple], where: str = "") -> None:
    """Raises a 400 that names the first of `fields` that asks for something nobody will do.

    where: the path of the object that holds the fields, for the message.
    """
    for name, value in fields.items():
        path = f"{where}.{name}" if where else name
        if name in neutral:
            if value is not None and not any(_is_same(value, allowed) for allowed in neutral[name]):
                raise bad_request(f"{path} is not supported, got {shown(value)}; leave it out", path)
        elif where or name not in LABELS:
            raise bad_request(f"{path} is not a known field", path)


def _is_same(value: object, allowed: object) -> bool:
    """JSON equality: 0 is 0.0, and neither is false."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
