"""`python -m jpaged.serve` as a process: how it starts, what it prints, how it ends."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import httpx
import pytest
from http_server import events
from scripted_engine import ScriptedEngine

from jpaged.serve.__main__ import attend
from jpaged.serve.config import ServeConfig
from jpaged.serve.loading import EngineLoader

ROOT = Path(__file__).parents[2]
SMALL = ["--max-num-batched-tokens", "2", "--max-num-seqs", "2", "--num-blocks-override", "33", "--dtype", "float32"]


class Process:
    """A server on a free port, with its stderr in a file."""

    def __init__(self, *flags: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "jpaged.serve", "--port", str(self.port), *flags]
        self._stderr = tempfile.NamedTemporaryFile("r")
        with open(self._stderr.name, "w") as stderr:
            self._process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        self._stderr.close()

    def status(self, path: str) -> int | None:
        """None while nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=10).status_code
        except httpx.ConnectError:
            return None

    def wait_for(self, path: str, *statuses: int) -> None:
        deadline = time.monotonic() + 60
        while self.status(path) not in statuses:
            assert self._process.poll() is None, self.printed()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self, number: int) -> float:
        """Sends a signal; returns how long the process took to end."""
        start = time.monotonic()
        self._process.send_signal(number)
        self._process.wait(20)
        return time.monotonic() - start

    def end(self) -> tuple[int, str]:
        """(status, stderr), when it ends."""
        return self._process.wait(60), self.printed()

    def printed(self) -> str:
        """All of stderr so far."""
        self._stderr.seek(0)
        return self._stderr.read()

    def wait_until_printed(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in self.printed():
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.05)


def test_a_port_in_use_is_one_line_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Process("--port", str(port)) as process:
            status, stderr = process.end()
    assert status == 1
    assert stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-num-seqs", "16", "--max-num-batched-tokens", "8"], "max_num_batched_tokens (8) must be at least"),
        (["--port", "port"], "must be an integer"),
        (["a", "--model", "b"], "MODEL (a) and --model (b) differ"),
    ],
)
def test_flags_that_cannot_work_are_one_line(flags, says):
    with Process(*flags) as process:
        status, stderr = process.end()
    assert status == 2
    assert says in stderr and stderr.count("\n") == 1


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with Process(str(tmp_path)) as process:
        status, stderr = process.end()
    assert status == 1
    first, error, *rest = stderr.splitlines()
    assert first.startswith("jpaged ") and error.startswith("error: ") and "NoSuchModel" in error
    assert rest == ["jpaged is stopping"]


BROKEN = "{{ bos_token }}\n{% if %}"
SAID = "the chat template is broken at line 2: Expected an expression, got 'end of statement block'"


def test_a_broken_template_of_the_model_is_told_once_and_completions_work(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(BROKEN)
    with Process(str(folder), *SMALL) as process:
        process.wait_for("/ready", 200)
        process.wait_until_printed("/v1/completions")  # the example, which is no chat
        chat = httpx.post(f"{process.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert chat.status_code == 400 and chat.json()["error"] == {
            "message": f"this model's {SAID[4:]}; give one with --chat-template, or use completions",
            "type": "BadRequestError", "param": None, "code": 400,
        }  # fmt: skip
        assert httpx.post(f"{process.url}/v1/completions", json={"prompt": "a"}, timeout=30).status_code == 200
        (line,) = [line for line in process.printed().splitlines() if SAID in line]
    assert f"WARNING {folder / 'chat_template.jinja'}: {SAID}. Chats are refused; completions work" in line


def test_a_broken_template_of_the_users_own_is_one_line_and_status_1(tiny_model, tmp_path):
    (tmp_path / "mine.jinja").write_text(BROKEN)
    with Process(tiny_model, "--chat-template", str(tmp_path / "mine.jinja")) as process:
        status, stderr = process.end()
    assert status == 1 and f"error: {tmp_path / 'mine.jinja'}: {SAID}" in stderr.splitlines()


def test_an_engine_that_dies_ends_the_server_with_status_1(capsys):
    engine = ScriptedEngine()
    loader = EngineLoader(lambda: engine)
    engine.death = "the device is gone"
    assert asyncio.run(attend(loader, ServeConfig(), "http://here")) == 1
    assert "error: the engine has died: the device is gone" in capsys.readouterr().err


def test_from_start_to_a_stop_in_the_middle_of_a_stream(tiny_model):
    with Process(tiny_model, *SMALL) as process:
        process.wait_for("/health", 503, 200)  # it answers while the model loads
        process.wait_for("/ready", 200)
        process.wait_until_printed("jpaged is ready at")
        body = {"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=30) as response:
            assert response.status_code == 200
            chunks = response.iter_text()
            text = next(chunks)
            seconds = process.stop(signal.SIGTERM)
            text += "".join(chunks)
        *_, error, done = events(text)
        assert json.loads(error)["error"]["message"] == "the server is stopping" and done == "[DONE]"
        assert seconds < 15
        status, stderr = process.end()
    assert status == 0
    assert f"jpaged is ready at {process.url}" in stderr
    assert f"curl -N {process.url}/v1/chat/completions" in stderr
    assert stderr.splitlines()[-2].endswith('"POST /v1/completions HTTP/1.1" 200')
    assert stderr.splitlines()[-1] == "jpaged is stopping"
    assert "Traceback" not in stderr


def test_ctrl_c_while_loading_ends_quickly(tiny_model):
    with Process(tiny_model, *SMALL) as process:
        process.wait_for("/health", 503, 200)
        assert process.stop(signal.SIGINT) < 15
        status, stderr = process.end()
    assert status == 0
    assert "Traceback" not in stderr
