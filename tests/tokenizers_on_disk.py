"""Tokenizers for tests: the default model's, a tiny SentencePiece one, and the vocabularies in shared data."""

import functools
import os
from pathlib import Path

import pytest

from jpaged.tokenizer import Tokenizer
from models.weights import DEFAULT_MODEL, open_checkpoint, resolve_model
from models.weights.gguf_file import GgufFile

DATA = Path(os.environ.get("JPAGED_DATA", Path(__file__).resolve().parent.parent.parent / "shared" / "data"))
VECTORS = DATA / "tokenizer_vectors"


@functools.cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(resolve_model(DEFAULT_MODEL)))


def vocabulary(name: str) -> Tokenizer:
    """A vocab-only GGUF of llama.cpp ("gpt-2", "llama-spm"); skips the test where it is absent."""
    path = VECTORS / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"no {path} (set JPAGED_DATA to the folder that has tokenizer_vectors)")
    return _read_vocabulary(path)


@functools.cache
def _read_vocabulary(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GgufFile(path).metadata, str(path))


def tiny_sentencepiece_metadata() -> dict:
    """A SentencePiece vocabulary with byte fallback, as a GGUF file holds it."""
    pieces = ["▁", "l", "o", "h", "e", "lo", "▁h", "el", "hel", "▁hel", "▁hello", "▁lo", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|user|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@functools.cache
def tiny_sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(tiny_sentencepiece_metadata(), "tiny")
