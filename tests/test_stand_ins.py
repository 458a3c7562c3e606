"""What lies in the place of a model's file that was never fetched is called what it is, whichever file it is."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_model import make_tiny_model, random_weights

from jpaged.config import EngineConfig
from jpaged.model_files import ModelFiles

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c\nsize 269060552\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html><head>\n<title>404 -\n Not Found</title></head><body>" + b"x" * 5000
DENIED = b'\xef\xbb\xbf<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
STAND_INS = {
    "pointer": (
        POINTER,
        "a Git LFS pointer to a file of 269 MB, not the file itself: run `git lfs pull` in its folder",
    ),
    "page": (PAGE, "a web page ('404 - Not Found'), not the file itself: what was downloaded is a server's answer"),
    "plain page": (b"<HTML>", "a web page, not the file itself: what was downloaded is a server's answer"),
    "denied": (DENIED, "a web page ('Access Denied'), not the file itself: what was downloaded is a server's answer"),
    "empty": (b"", "the file is empty: fetch it again"),
}
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    names = {name: "model.safetensors" for name in random_weights()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def refusal(**config) -> str:
    with pytest.raises(ValueError) as caught:
        ModelFiles.open(EngineConfig(**config))
    return str(caught.value)


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("name", FILES)
def test_each_file_of_a_folder_is_looked_at(folder, name, kind):
    ModelFiles.open(EngineConfig(model=str(folder)))
    content, says = STAND_INS[kind]
    (folder / name).write_bytes(content)
    assert refusal(model=str(folder)) == f"{folder / name}: {says}"


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_shard_a_gguf_file_an_old_tokenizer_and_a_template_of_the_users_are_looked_at(folder, tmp_path, kind):
    content, says = STAND_INS[kind]
    template = tmp_path / "mine.jinja"
    template.write_bytes(content)
    assert refusal(model=str(folder), chat_template=str(template)) == f"{template}: {says}"

    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(content)
    assert refusal(model=str(gguf)) == f"{gguf}: {says}"

    (folder / "tokenizer.json").rename(folder / "kept")
    (folder / "tokenizer.model").write_bytes(content)
    assert refusal(model=str(folder)) == f"{folder / 'tokenizer.model'}: {says}"
    (folder / "kept").rename(folder / "tokenizer.json")

    weights = random_weights()
    name, tensor = weights.popitem()
    save_file(weights, folder / "model.safetensors")
    save_file({name: tensor}, folder / "second.safetensors")
    names = dict.fromkeys(weights, "model.safetensors") | {name: "second.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    opened = ModelFiles.open(EngineConfig(model=str(folder))).checkpoint
    np.testing.assert_array_equal(opened.tensor(name), tensor)
    (folder / "second.safetensors").write_bytes(content)
    assert refusal(model=str(folder)) == f"{folder / 'second.safetensors'}: {says}"


def test_a_servers_plain_words_are_no_weights(folder):
    (folder / "model.safetensors").write_bytes(b"Repository not\nfound\n")
    said = refusal(model=str(folder))
    assert said == f"{folder / 'model.safetensors'}: text, not weights: it begins with 'Repository not found'"


def test_text_that_is_not_utf_8_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"hello \xff")
    said = refusal(model=str(folder))
    assert said == f"{folder / 'chat_template.jinja'}: not UTF-8 text: invalid start byte at byte 6"


def test_broken_template_of_the_users_own_is_refused_with_its_line(folder, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{{ bos_token }}\n{% for m in messages %}\n{{ m.content }")
    said = refusal(model=str(folder), chat_template=str(template))
    assert said == f"{template}: the chat template is broken at line 3: unexpected '}}'"
    template.write_text("{{ messages[0].content }}")
    opened = ModelFiles.open(EngineConfig(model=str(folder), chat_template=str(template)))
    assert opened.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"
