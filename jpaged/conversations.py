"""Conversations in the forms that people have them: messages as objects, of OpenAI's client or their own."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.prompts import shown

FORMS = 'a list of messages, each {"role": ..., "content": ...}'


def read_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or each of several. A message alone is a conversation.

    A message may also be a dataclass or a pydantic model; what it leaves None is left out. Content in parts of text
    becomes one text. Raises ValueError that names the conversation.
    """
    if _as_message(messages) is not None:
        return [[_as_message(messages)]]
    items = _items(messages)
    if items is None:
        raise ValueError(f"messages must be {FORMS}, or a list of such lists, got {shown(messages)}")
    if any(_as_message(item) is not None for item in items):
        return [_conversation(items, "messages")]
    return [_conversation(item, f"conversation {number}") for number, item in enumerate(items)]


def _conversation(messages: Any, name: str) -> list[dict[str, Any]]:
    items = _items(messages)
    if not items:
        raise ValueError(f"{name} must be {FORMS}, got {shown(messages)}")
    found = [_as_message(item) for item in items]
    if None in found:
        at = found.index(None)
        raise ValueError(f"{name} must be {FORMS}, got {shown(items[at])} at {at}")
    return found


def _items(value: Any) -> list[Any] | None:
    """None for what is no list of anything."""
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return list(value) if is_list else None


def _as_message(value: Any) -> dict[str, Any] | None:
    """None for what is no message."""
    if isinstance(value, Mapping):
        message = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        message = {name: item for name, item in dataclasses.asdict(value).items() if item is not None}
    elif callable(getattr(value, "model_dump", None)):
        message = value.model_dump(exclude_none=True)
    else:
        return None
    parts = message.get("content")
    if isinstance(parts, (list, tuple)) and parts:
        texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
            message["content"] = "\n".join(texts)  # as the server does
    return message
