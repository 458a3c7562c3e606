"""Detokenizer and StopStringChecker: from a request's tokens, one at a time, to text that will not change again."""

import codecs

from jpaged.token_bytes import TokenBytes

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns token ids into text as they come.

    The pieces that `push` and the final `flush` return, joined, are what Tokenizer.decode returns for all the ids with
    the same options, whatever the ids: bytes that are not UTF-8 become U+FFFD, and the head of a character that is not
    complete yet is held back. About 0.5 us a token.
    """

    __slots__ = ("_at_start", "_decode", "_decoder", "_skip_ids", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True, is_continuation: bool = False):
        self._token_bytes = token_bytes
        self._skip_ids = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder("replace")
        self._decode = self._decoder.decode
        self._at_start = token_bytes.strips_leading_space and not is_continuation

    @property
    def unfinished(self) -> bytes:
        """The head of a character that is held back."""
        return self._decoder.getstate()[0]

    def push(self, token_id: int) -> str:
        """The text that this token makes certain, often "" in the middle of a character."""
        if token_id in self._skip_ids:
            return ""
        return self._strip(self._decode(self._token_bytes[token_id]))

    def flush(self) -> str:
        """What is left once no more tokens come: U+FFFD for an unfinished character, else ""."""
        return self._strip(self._decode(b"", True))

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStringChecker:
    """Passes text through until a stop string is complete, and never lets out the head of one.

    The stop string that is completed first wins (of several completed by the same character, the longest), as if the
    text came one character at a time: the answer does not depend on how tokens cut the text up.
    After a hit `stop_string` is set and everything later is swallowed.
    """

    __slots__ = ("_held", "_heads", "_include", "_longest", "_stop", "stop_string")

    def __init__(self, stop: tuple[str, ...], *, include_stop_str_in_output: bool = False):
        self._stop = stop
        self._include = include_stop_str_in_output
        self._heads = frozenset(s[0] for s in stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.stop_string: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be shown now.

        With may_stop false (under min_tokens) a stop string that this text completes is only text. One that it begins
        may still be completed later, so its head is held back all the same.
        """
        if self.stop_string is not None:
            return ""
        if not self._stop:
            return text
        num_old = len(self._held)
        text, self._held = self._held + text, ""
        if may_stop:
            # what ends within the old text was completed too early, and passed over then
            starts = ((stop, text.find(stop, max(0, num_old - len(stop) + 1))) for stop in self._stop)
            hits = [(start + len(stop), start, stop) for stop, start in starts if start >= 0]
            if hits:
                end, start, self.stop_string = min(hits)
                return text[: end if self._include else start]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._heads and self._is_head(text[start:]):
                self._held = text[start:]
                return text[:start]
        return text

    def _is_head(self, text: str) -> bool:
        return any(len(stop) > len(text) and stop.startswith(text) for stop in self._stop)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
