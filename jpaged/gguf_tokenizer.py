"""Building a `tokenizers` pipeline from the vocabulary in a GGUF file."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# token types, from gguf.constants.TokenType
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

# pre-tokenizer patterns, from llama.cpp's src/llama-vocab.cpp
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA_CPP_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _LLAMA_CPP_DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
}
_LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3")  # a whole word in the vocabulary is taken before any merge
_NFC_KINDS = ("qwen2", "deepseek-r1-qwen")


def build_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Raises ValueError that names `source` for an unknown model or pre-tokenizer kind, and for a vocabulary that
    contradicts itself.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model, tokens = get("model"), get("tokens")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"{source}: tokenizer model {model!r} is not supported, only ['gpt2', 'llama']")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{source}: metadata tokenizer.ggml.tokens is missing")
    token_types = get("token_type", [1] * len(tokens))
    if len(token_types) != len(tokens):
        raise ValueError(f"{source}: {len(token_types)} token types for {len(tokens)} tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if model == "gpt2":
        tokenizer = _byte_level_bpe(
            vocab, get("merges", []), get("pre", "default"), bool(get("add_space_prefix")), source
        )
    else:
        tokenizer = _sentencepiece_bpe(vocab, tokens, token_types, get, source)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in _of_type(CONTROL, tokens, token_types)]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in _of_type(USER_DEFINED, tokens, token_types)]
    )
    _add_bos_and_eos(tokenizer, tokens, get, has_bos=model == "llama" or get("pre") in _LLAMA3_KINDS, source=source)
    return tokenizer


def _of_type(wanted: int, tokens: list[str], token_types: list[int]) -> list[str]:
    return [token for token, token_type in zip(tokens, token_types, strict=True) if token_type == wanted]


def _byte_level_bpe(
    vocab: dict[str, int], merges: list[str], kind: str, add_prefix_space: bool, source: str
) -> Tokenizer:
    if kind not in _PATTERNS:
        raise ValueError(f"{source}: pre-tokenizer kind {kind!r} is not supported, only {sorted(_PATTERNS)}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for index, pair in enumerate(pairs):
        if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            raise ValueError(f"{source}: merge {index} ({merges[index]!r}) does not join two tokens to a third")
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=kind in _LLAMA3_KINDS))
    if kind in _NFC_KINDS:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[kind]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(vocab, tokens, token_types, get, source: str) -> Tokenizer:
    scores = get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError(f"{source}: {len(scores or ())} token scores for {len(tokens)} tokens")
    unknown = _of_type(UNKNOWN, tokens, token_types)
    model = models.BPE(
        vocab,
        _merges_from_scores(vocab, tokens, token_types, scores),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=BYTE in token_types,
    )
    tokenizer = Tokenizer(model)
    has_prefix = bool(get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges_from_scores(vocab, tokens, token_types, scores) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours that make the best-scored token, so every way to split a token is a merge."""
    skipped = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    found = [
        (scores[token_id], cut, token[:cut], token[cut:])
        for token_id, token in enumerate(tokens)
        if token_types[token_id] not in skipped
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(left, right) for _, _, left, right in found]


def _add_bos_and_eos(tokenizer: Tokenizer, tokens: list[str], get, has_bos: bool, source: str) -> None:
    """Makes encode(add_special_tokens=True) add what the file asks for."""
    added: dict[str, str] = {}
    for name, default in (("bos", has_bos), ("eos", False)):
        token_id = get(f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"{source}: {name}_token_id {token_id} is outside the vocabulary of {len(tokens)}")
        if get(f"add_{name}_token", default) and token_id is not None:
            added[name] = tokens[token_id]
    if added:
        template = [*([added["bos"]] if "bos" in added else []), "$A", *([added["eos"]] if "eos" in added else [])]
        ids = [(token, tokenizer.token_to_id(token)) for token in set(added.values())]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
