"""Tokenizer: text to token ids and back, with the model's chat template."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jpaged.chat_template import ChatTemplate
from jpaged.detokenizer import Detokenizer
from jpaged.gguf_tokenizer import build_gguf_tokenizer
from jpaged.token_bytes import TokenBytes
from models.weights import Checkpoint, read_json, read_text, refuse_stand_in

_SPECIAL_NAMES = ("bos", "eos", "unk", "pad")
_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt")


class Tokenizer:
    """Made by `from_checkpoint`, `from_gguf_metadata` or `from_folder`. Never changes: threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        template_origin: str = "the chat template",
    ):
        """special_tokens: {"bos_token": "<s>", "eos_token": ...}; names that the model lacks are left out.
        template_origin: where the chat template comes from, for what is said of it.
        """
        backend.no_truncation()  # tokenizer.json may carry a training run's limits
        backend.no_padding()
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        self._chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self._template_origin = template_origin
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id(special_tokens, "bos_token")
        eos_token_id = self._special_id(special_tokens, "eos_token")
        self.eos_token_ids = frozenset(extra_eos_token_ids) | ({eos_token_id} - {None})

    def _special_id(self, special_tokens: Mapping[str, str], name: str) -> int | None:
        return self._backend.token_to_id(special_tokens[name]) if name in special_tokens else None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, chat_template: str | None = None) -> "Tokenizer":
        """The tokenizer that belongs to an open checkpoint; `chat_template` replaces the model's own.

        Raises ValueError, one line that names the file, when it has none that can be used.
        """
        eos_token_ids = checkpoint.generation_defaults.eos_token_ids
        if checkpoint.gguf_metadata is not None:
            return cls.from_gguf_metadata(
                checkpoint.gguf_metadata, str(checkpoint.source), chat_template, eos_token_ids
            )
        return cls.from_folder(checkpoint.source, chat_template, eos_token_ids)

    @classmethod
    def from_gguf_metadata(
        cls,
        metadata: Mapping[str, Any],
        source: str,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> "Tokenizer":
        """From a GGUF file's key/value pairs; `source` is its name in errors."""
        backend = build_gguf_tokenizer(metadata, source)
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        special_tokens = {f"{name}_token": backend.id_to_token(i) for name, i in ids.items() if i is not None}
        special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        template = chat_template or metadata.get("tokenizer.chat_template")
        return cls(backend, special_tokens, template, eos_token_ids, f"{source}: metadata tokenizer.chat_template")

    @classmethod
    def from_folder(
        cls, folder: Path | str, chat_template: str | None = None, eos_token_ids: Iterable[int] = ()
    ) -> "Tokenizer":
        """From a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = {}
        for name in (f"{short}_token" for short in _SPECIAL_NAMES):
            value = config.get(name)
            if token := value.get("content") if isinstance(value, dict) else value:
                special_tokens[name] = token
        template, origin = _folder_chat_template(folder, config)
        return cls(_load_backend(folder), special_tokens, chat_template or template, eos_token_ids, str(origin))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Text of special tokens becomes those tokens. add_special_tokens puts BOS (and EOS) where the model
        wants them: not for text from a chat template, which has its own.

        Raises ValueError for a str that cannot be UTF-8 (a lone surrogate).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ValueError(f"text must be a str that UTF-8 can hold, got {text!r:.100}") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, is_continuation: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing.

        is_continuation: the ids follow others (a generation follows its prompt), so a SentencePiece tokenizer's leading
        space is part of the text. Other tokenizers make no difference.
        """
        stream = self.stream(skip_special_tokens, is_continuation)
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self, skip_special_tokens: bool = True, is_continuation: bool = False) -> Detokenizer:
        """An incremental `decode`, for one request."""
        return Detokenizer(self._token_bytes, skip_special_tokens=skip_special_tokens, is_continuation=is_continuation)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling ("Ġthe", "▁the", "<0x0A>"); None for an id outside it."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, also for a special token."""
        return self._token_bytes[token_id]

    def decoded_token(self, token_id: int) -> str:
        """One token as text on its own, special or not. One that holds a piece of a character has no text: it is named by
        its bytes, as OpenAI does ("bytes:\\xf0\\x9f")."""
        token = self._token_bytes[token_id]
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def text_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Where in text each token of `encode` begins, in characters; a piece of a character at that character. Tokens
        that were added begin where the next one does."""
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        offsets, begin, end = [], 0, 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets):
            token = self._token_bytes[token_id].decode("utf-8", "replace")
            whole = token.partition("\ufffd")[0]
            # some tokenizers leave the spaces around a word out of its offsets: then it begins where the one before ends
            begin = max(begin, end if whole and text.startswith(whole, end) else start)
            end = begin + len(token) if text.startswith(token, begin) else max(stop, begin)
            offsets.append(begin)
        return offsets

    def to_json(self) -> str:
        """The whole pipeline as the text of a tokenizer.json."""
        return self._backend.to_str()

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._token_bytes.special_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether there is one that compiles."""
        return self._chat_template is not None and self._chat_template.fault is None

    @property
    def chat_template_fault(self) -> str | None:
        """One line that says where the chat template is broken; None where it is not, or there is none."""
        fault = self._chat_template and self._chat_template.fault
        return fault and f"{self._template_origin}: the chat template is {fault}"

    def check_chat_template(self) -> None:
        """Raises ValueError where no chat can be rendered, whatever its messages."""
        advice = "give one with --chat-template, or use completions"
        if self._chat_template is None:
            raise ValueError(f"this model has no chat template: {advice}")
        if (fault := self._chat_template.fault) is not None:
            raise ValueError(f"this model's chat template is {fault}; {advice}")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text for a conversation; see ChatTemplate.render. ValueError where the model has no template that
        compiles."""
        self.check_chat_template()
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_slow_tokenizer(folder)
    refuse_stand_in(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special than Exception
        raise ValueError(f"{path}: not a readable tokenizer: {' '.join(str(error).split())}") from error


def _convert_slow_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """For folders that have only tokenizer.model or vocab.json and merges.txt."""
    from transformers import AutoTokenizer  # seconds to import, and only such a folder needs it

    for path in (folder / name for name in _SLOW_FILES):
        if path.is_file():
            refuse_stand_in(path)
    try:
        return AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{folder}: no tokenizer.json, and no other tokenizer that can be converted: {reason}"
        ) from error


def _folder_chat_template(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Path]:
    """The template, None where there is none, and the file that it is to come from."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path), path
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, Mapping)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return template, folder / "tokenizer_config.json"
