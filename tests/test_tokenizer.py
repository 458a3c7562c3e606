"""Tokenizer: the reference's ids exactly, text back unchanged, and an unknown kind refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_on_disk import VECTORS, smollm2, tiny_sentencepiece, tiny_sentencepiece_metadata, vocabulary

from jpaged.gguf_tokenizer import build_gguf_tokenizer
from jpaged.tokenizer import Tokenizer
from models.weights import GenerationDefaults

FIXTURE = Path(__file__).parent / "fixtures" / "smollm2_greedy.json"
SEPARATOR = "\n__ggml_vocab_test__\n"
TEXTS = [
    "",
    " ",
    "Hello, world! 1234567 3.14",
    "def f(x):\n\treturn  x\r\n\n\n  # done",
    "naïve café — “quotes” ñandú",
    "人工智能 नमस्ते مرحبا 👩‍👩‍👧‍👦🏳️‍🌈😀",
    "a\x00b\u200b\ufffd",
]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_ids_equal_the_reference_vectors_and_decode_to_the_text(name):
    tokenizer = vocabulary(name)
    texts = (VECTORS / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (VECTORS / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")  # the last text is empty
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = [int(number) for number in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text


def test_default_models_ids_and_chat_template_equal_hugging_faces():
    tokenizer = smollm2()
    prompts = json.loads(FIXTURE.read_text(encoding="utf-8"))["prompts"]
    assert len(prompts) == 20
    for prompt in prompts:
        assert tokenizer.encode(prompt["text"], add_special_tokens=False) == prompt["prompt_token_ids"], prompt["name"]
        if "messages" in prompt:
            assert tokenizer.apply_chat_template(prompt["messages"]) == prompt["text"]


def test_default_model_ends_at_im_end_and_adds_no_bos():
    tokenizer = smollm2()
    assert tokenizer.eos_token_ids == {2} and tokenizer.id_to_token(2) == "<|im_end|>"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.has_chat_template) == (49152, 1, True)
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert tokenizer.special_token_ids == set(range(17))


@pytest.mark.parametrize("make", [smollm2, tiny_sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_unchanged(make, text):
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_skipped_or_shown_and_unknown_ids_are_nothing():
    tokenizer = smollm2()
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.decode([-1, 49152, 10**12, *ids]) == "user\nhi"
    assert tokenizer.id_to_token(49152) is None and tokenizer.id_to_token(-1) is None
    assert tokenizer.decoded_token(1) == "<|im_start|>" and tokenizer.token_bytes(49152) == b""


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = tiny_sentencepiece()
    spell = lambda text: [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]  # noqa: E731
    assert spell("hello lo") == ["<s>", "▁hello", "▁lo"]
    assert spell("helo") == ["<s>", "▁h", "e", "lo"]  # not "▁hel", "o": "lo" has the best score
    assert spell("é😀") == ["<s>", "▁", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert spell("<|user|>o")[:2] == ["<s>", "<|user|>"]


def test_sentencepiece_leading_space_belongs_to_a_continuation():
    tokenizer = tiny_sentencepiece()
    ids = tokenizer.encode("lo", add_special_tokens=False)
    assert tokenizer.decode(ids) == "lo"
    assert tokenizer.decode(ids, is_continuation=True) == " lo"


def test_bos_and_eos_are_added_as_the_file_says():
    metadata = tiny_sentencepiece_metadata()
    for has_bos, has_eos in ((True, True), (False, True), (False, False)):
        metadata |= {"tokenizer.ggml.add_bos_token": has_bos, "tokenizer.ggml.add_eos_token": has_eos}
        tokenizer = Tokenizer.from_gguf_metadata(metadata, "tiny")
        plain = tokenizer.encode("lo", add_special_tokens=False)
        assert tokenizer.encode("lo") == [1] * has_bos + plain + [2] * has_eos


def byte_level_metadata(kind: str) -> dict:
    """Every byte a token, and no merges: token boundaries are then those of the bytes, and splits do not show."""
    backend_alphabet = [smollm2().id_to_token(i) for i in range(49152)]
    alphabet = sorted(token for token in backend_alphabet if len(token) == 1)
    words = ["12", "123", "34", "1234", "he", "hel", "hell", "hello"]
    merges = ["1 2", "12 3", "3 4", "123 4", "h e", "he l", "hel l", "hell o"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": alphabet + words,
        "tokenizer.ggml.merges": merges,
    }


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("default", ["123", "4"]),
    ],
)
def test_pre_tokenizer_kind_decides_how_digits_are_grouped(kind, pieces):
    backend = build_gguf_tokenizer(byte_level_metadata(kind), "x.gguf")
    assert backend.encode("1234").tokens == pieces
    assert backend.encode("hello").tokens == ["hello"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "viking"}, r"x\.gguf: pre-tokenizer kind 'viking' is not supported, only \["),
        ({"model": "bert"}, r"x\.gguf: tokenizer model 'bert' is not supported"),
        ({"model": None}, r"x\.gguf: tokenizer model None is not supported"),
        ({"tokens": None}, r"x\.gguf: metadata tokenizer\.ggml\.tokens is missing"),
        ({"merges": ["1 2", "1 zz"]}, r"x\.gguf: merge 1 \('1 zz'\) does not join"),
        ({"token_type": [1, 1]}, r"x\.gguf: 2 token types for \d+ tokens"),
        ({"bos_token_id": 10**6}, r"x\.gguf: bos_token_id 1000000 is outside the vocabulary"),
    ],
)
def test_gguf_tokenizer_that_cannot_be_built_is_refused_by_name(changes, message):
    metadata = byte_level_metadata("gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf_metadata(metadata, "x.gguf")


@pytest.fixture
def folder(tmp_path):
    """The default model's tokenizer as a Hugging Face folder."""
    (tmp_path / "tokenizer.json").write_text(smollm2().to_json(), encoding="utf-8")
    config = {
        "bos_token": {"content": "<|im_start|>", "special": True},
        "eos_token": "<|im_end|>",
        "chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_hugging_face_folder_gives_the_same_tokenizer(folder):
    defaults = GenerationDefaults(eos_token_ids=(0, 2))
    checkpoint = SimpleNamespace(source=folder, gguf_metadata=None, generation_defaults=defaults)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    for text in TEXTS:
        assert tokenizer.encode(text) == smollm2().encode(text)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {0, 2})
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|im_end|>"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ bos_token }}")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "hi<|im_start|>"
    assert Tokenizer.from_folder(folder, chat_template="mine").apply_chat_template(messages) == "mine"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_broken_chat_template_is_told_with_its_file_and_line_and_the_rest_works(folder, where):
    broken = "{{ bos_token }}\n{% if %}"
    if where == "chat_template.jinja":
        (folder / where).write_text(broken)
    else:
        (folder / where).write_text(json.dumps({"chat_template": broken}))
    tokenizer = Tokenizer.from_folder(folder)
    assert not tokenizer.has_chat_template and tokenizer.encode("hi") == smollm2().encode("hi")
    said = f"{folder / where}: the chat template is broken at line 2: Expected an expression"
    assert tokenizer.chat_template_fault.startswith(said)
    said = "^this model's chat template is broken at line 2: .*; give one with --chat-template, or use completions$"
    with pytest.raises(ValueError, match=said):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert smollm2().chat_template_fault is None and smollm2().has_chat_template


@pytest.mark.parametrize("templates", [[{"name": "tools"}], ["x"], [], None, [{"name": "default"}]])
def test_folder_without_a_default_template_has_none(folder, templates):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.from_folder(folder)
    assert not tokenizer.has_chat_template and tokenizer.chat_template_fault is None
    with pytest.raises(ValueError, match="^this model has no chat template: give one with --chat-template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_truncation_and_padding_in_tokenizer_json_are_ignored(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(folder).encode("one two three four")) == 4


def test_damaged_hugging_face_tokenizer_is_refused_by_name(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: a JSON object was expected, not list"):
        Tokenizer.from_folder(folder)


def test_decoder_that_is_not_a_concatenation_of_bytes_is_refused_by_name(folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\] is not supported"):
        Tokenizer.from_folder(folder)


def test_lone_surrogate_is_a_value_error():
    with pytest.raises(ValueError, match=r"text must be a str that UTF-8 can hold, got 'a\\ud800'"):
        smollm2().encode("a\ud800")


def test_import_loads_neither_jax_nor_torch_nor_transformers():
    code = "import sys, jpaged.tokenizer; print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    root = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("token", "name"), [(b"\xf0\x9f", r"bytes:\xf0\x9f"), (b" \xf0\x9f", r"bytes:\x20\xf0\x9f")])
def test_a_token_that_holds_a_piece_of_a_character_is_named_by_its_bytes(token, name):
    tokenizer = smollm2()
    found = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == token]
    assert [tokenizer.decoded_token(i) for i in found] == [name] * len(found) and found


@pytest.mark.parametrize("make", [smollm2, tiny_sentencepiece])
@settings(max_examples=200)
@given(text=st.text(st.sampled_from("aeé🦜 \n.I<l|>"), min_size=1, max_size=20))
def test_a_tokens_offset_is_its_place_in_the_text(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text)
    offsets = tokenizer.text_offsets(text)
    assert offsets == sorted(offsets) and len(offsets) == len(ids)
    for token_id, offset in zip(ids, offsets):
        token = tokenizer.decoded_token(token_id)
        if token.startswith("bytes:"):
            assert any(ord(c) > 127 for c in text[offset : offset + 2])
        elif token_id not in tokenizer.special_token_ids and not (make is tiny_sentencepiece and offset == 0):
            assert text[offset : offset + len(token)] == token, (text, token, offset)


def test_spaces_that_a_tokenizer_leaves_out_of_its_offsets_belong_to_the_word_after_them():
    """As GPT-2's and Llama 3's do, whose files ask for trimmed offsets."""
    backend = tokenizers.Tokenizer.from_str(smollm2().to_json())
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    assert backend.encode("a  sea").offsets[-1] == (3, 6)
    text = "I like   the 🦜 and  the sea\n\n ."
    assert Tokenizer(backend, {}).text_offsets(text) == smollm2().text_offsets(text)
