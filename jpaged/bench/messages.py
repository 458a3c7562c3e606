"""MessageWriter: a chat's messages of so many tokens, for servers that take text alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jpaged.bench.workloads import BenchRequest
from jpaged.tokenizer import Tokenizer
from models.weights import open_checkpoint, resolve_model

ATTEMPTS = 10  # to meet a length: what is written in tokens is read again in others


class MessageWriter:
    """Writes with the model's own tokenizer. What the chat template adds to a message is not counted."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        special = tokenizer.special_token_ids
        texts = ((token, tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self._ids = [token for token, text in texts if token not in special and _is_plain(text)]
        if not self._ids:
            raise ValueError("the tokenizer has no token that is plain text")

    @classmethod
    def for_model(cls, names: Sequence[str]) -> "MessageWriter":
        """Of the first of these names, in the forms of --model, that has a tokenizer here. Raises ValueError."""
        reasons = []
        for name in names:
            try:
                return cls(_load_tokenizer(name))
            except (ValueError, OSError) as error:
                reasons.append(" ".join(str(error).split()))
        raise ValueError(f"chats need the model's tokenizer: give it with --tokenizer ({reasons[0]})")

    @property
    def vocab_size(self) -> int:
        """How many different tokens it writes with."""
        return len(self._ids)

    def write(self, request: BenchRequest) -> BenchRequest:
        """The request with a text in place of its numbers below vocab_size, and the token ids that the text has.

        They are as many as the numbers, but for a few where no text comes out so. Requests that begin alike get texts
        that begin alike.
        """
        wanted = len(request.prompt)
        more = np.random.default_rng(request.prompt)
        ids = [self._ids[number] for number in request.prompt]
        for _ in range(ATTEMPTS):
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted:
                break
            num_missing = max(wanted - len(ids), 0)
            ids = ids[:wanted] + [self._ids[i] for i in more.integers(len(self._ids), size=num_missing)]
        text = self._tokenizer.decode(ids)
        return replace(request, prompt=self._tokenizer.encode(text, add_special_tokens=False), text=text)


def _is_plain(text: bytes) -> bool:
    """Whether it comes back as it is: no part of a character and no marker, special or not."""
    try:
        is_printable = text.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        return False
    is_marker = len(text) > 1 and text.startswith(b"<") and text.endswith(b">")
    return is_printable and text != b"" and not is_marker


def _load_tokenizer(name: str) -> Tokenizer:
    path = resolve_model(name, with_weights=False)
    return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_checkpoint(open_checkpoint(path))
