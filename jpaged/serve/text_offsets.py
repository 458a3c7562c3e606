"""TextOffsets: where in a text each of its tokens begins."""

import jpaged


class TextOffsets:
    """Counts characters over one choice's tokens, in order. start: characters before the first one.

    A token's offset is that of its first character, a piece's that of the character which it belongs to, as OpenAI's
    text_offset. A special token that the text leaves out takes no room.
    """

    def __init__(
        self, tokenizer: "jpaged.tokenizer.Tokenizer", *, skip_special_tokens: bool, start: int, is_continuation: bool
    ):
        self._token_bytes = tokenizer.token_bytes
        self._skip_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._detokenizer = tokenizer.stream(skip_special_tokens, is_continuation)
        self._num_characters = start

    def next(self, token_id: int) -> int:
        """Where the token begins."""
        begin, unfinished = self._num_characters, self._detokenizer.unfinished
        if token_id in self._skip_ids:
            return begin
        self._num_characters += len(self._detokenizer.push(token_id))
        if unfinished and not _goes_on(self._token_bytes(token_id)):
            begin += len(unfinished.decode("utf-8", "replace"))  # nothing will complete what came before
        return begin


def _goes_on(token: bytes) -> bool:
    """Whether a token begins inside a character."""
    return token[:1] >= b"\x80" and token[:1] < b"\xc0"
