"""Prompts in the forms that people have them: text, token ids, objects of vLLM's, and arrays and columns of these."""

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

FORMS = 'text, token ids or {"prompt": text} or {"prompt_token_ids": ids}'
_FIELDS = ("prompt", "prompt_token_ids")
_NO_LISTS = (str, bytes, bytearray, Mapping, set, frozenset)  # can be iterated, but not over prompts or ids in an order

Encode = Callable[[str], list[int]]


class Prompt(NamedTuple):
    """text is None where token ids were given alone."""

    text: str | None
    token_ids: list[int]


def read_prompt(prompt: Any, encode: Encode, name: str = "prompt") -> Prompt:
    """The text and the token ids, plain ints, of one prompt; text is encoded where no ids come with it.

    Ids may be any iterable of integers, or an array of one dimension. Raises ValueError that begins with `name`.
    """
    text, token_ids = _parts(prompt, name)
    if token_ids is None:
        try:
            token_ids = encode(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return Prompt(text, token_ids)


def read_prompts(prompts: Any, encode: Encode) -> list[Prompt]:
    """`read_prompt` of one prompt, or of each of several: of a list, a column, a generator, the rows of an array.

    Integers are one prompt. Raises ValueError that begins with the prompt's number.
    """
    return [read_prompt(prompt, encode, f"prompt {number}") for number, prompt in enumerate(_as_list(prompts))]


def shown(value: object) -> str:
    """A value in a few words, however large it is."""
    array = _as_array(value)
    if array is not None and array.ndim:
        return f"an array of {array.dtype} with shape {array.shape}"
    return " ".join(_short.repr(value).split())


_short = reprlib.Repr(maxlevel=3, maxlist=6, maxtuple=6, maxdict=4, maxstring=60, maxother=80)


def _as_list(prompts: Any) -> list[Any]:
    array = _as_array(prompts)
    if array is not None:
        if array.ndim and not array.size:
            return []
        is_column = array.ndim == 1 and array.dtype.kind in "iuOUT"
        is_batch = array.ndim == 2 and array.dtype.kind in "iu"
        items = array.tolist() if is_column or is_batch else [prompts]
    elif isinstance(prompts, _NO_LISTS) or not isinstance(prompts, Iterable):
        items = [prompts]
    else:
        items = list(prompts)
    is_one = len(items) > 0 and items[0] is not prompts and _integer(items[0]) is not None
    return [items] if is_one else items


def _parts(prompt: Any, name: str) -> tuple[str | None, list[int] | None]:
    """(text, ids), not both None."""
    text, ids = prompt, None
    if isinstance(prompt, Mapping):
        if unknown := [field for field, value in prompt.items() if field not in _FIELDS and value is not None]:
            raise ValueError(f"{name} must be {FORMS}, got an object with {unknown[0]!r}")
        text, ids = (prompt.get(field) for field in _FIELDS)
    if isinstance(text, str) and ids is None:
        return str(text), None  # numpy has a str of its own
    if ids is None:
        text, ids = None, text
    try:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"got {shown(text)} as text")
        return text, _token_ids(ids)
    except ValueError as error:
        raise ValueError(f"{name} must be {FORMS}, {error}") from None


def _token_ids(value: Any) -> list[int]:
    """Raises ValueError that says what it got instead."""
    array = _as_array(value)
    if array is not None and array.ndim == 1 and array.dtype.kind in "iu":
        return array.tolist()
    is_list = isinstance(value, Iterable) and not isinstance(value, _NO_LISTS)
    if not is_list or (array is not None and (array.ndim != 1 or array.dtype.kind != "O")):
        raise ValueError(f"got {shown(value)}")
    ids = []
    for index, item in enumerate(value):
        if (token_id := _integer(item)) is None:
            raise ValueError(f"got {shown(item)} as token id {index}")
        ids.append(token_id)
    return ids


def _integer(value: Any) -> int | None:
    """A plain int; None for what is none, a bool too."""
    if type(value) is int:
        return value
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        return None if is_bool else operator.index(value)
    except TypeError:
        return None


def _as_array(value: Any) -> np.ndarray | None:
    """What numpy, JAX, torch or pandas hold, without importing them; None for anything else."""
    if isinstance(value, (str, np.generic)) or not hasattr(value, "__array__"):
        return None
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # of a type that numpy has not, or on a device
        return None
