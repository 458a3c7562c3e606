"""TokenBytes: what each token id contributes to the text, as bytes."""

import json
import re

import tokenizers

_METASPACE = "▁"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (encoder.py, bytes_to_unicode), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _steps(decoder: dict) -> list[dict]:
    return (
        [step for child in decoder["decoders"] for step in _steps(child)]
        if decoder["type"] == "Sequence"
        else [decoder]
    )


class TokenBytes:
    """token id -> bytes, for tokenizers whose text is the concatenation of its tokens' bytes.

    That holds for byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and for SentencePiece with or without byte fallback
    (Llama 2, Mistral), and it is what makes decoding incremental and exact. Any other decoder is a ValueError.
    An id that the tokenizer does not know (a padded embedding has such rows) is no bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        kinds = [step["type"] for step in steps]
        self._is_byte_level = kinds == ["ByteLevel"]
        is_sentencepiece = kinds == ["Metaspace"] or (
            "Replace" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        )
        if not self._is_byte_level and not is_sentencepiece:
            raise ValueError(f"tokenizer decoder {kinds or None} is not supported, only ByteLevel and SentencePiece's")
        # SentencePiece puts a space before the text when it encodes, and takes it away when it decodes
        self.strips_leading_space = "Strip" in kinds or any(
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
        )

    def __getitem__(self, token_id: int) -> bytes:
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if not self._is_byte_level:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_METASPACE, " ").encode()
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode()  # an added token is plain text
