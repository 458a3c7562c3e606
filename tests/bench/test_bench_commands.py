"""The commands as a user runs them, with a tiny random model."""

import json
import sys

import pytest
from engines import make_small_async_engine
from http_server import http_server

from jpaged.bench.__main__ import COMMANDS, main

SHORT = ["--num-prompts", "4", "--input-len", "6", "--output-len", "5"]


@pytest.fixture(scope="module")
def url(tiny_model, programs_dir):
    engine = make_small_async_engine(tiny_model, num_blocks_override=33, compilation_cache_dir=programs_dir)
    with http_server(lambda: engine) as url:
        yield url
    engine.shutdown()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"jpaged.bench {command}" in capsys.readouterr().out


def test_serve_measures_a_running_server_at_every_rate(url, tmp_path, capsys):
    flags = ["--base-url", url, "--vocab-size", "256", "--request-rate", "50,inf", "--json", str(tmp_path / "r.json")]
    assert main(["serve", *SHORT, *flags, "--save-detailed"]) == 0
    assert capsys.readouterr().out.count("Successful requests:                     4") == 2
    results = json.loads((tmp_path / "r.json").read_text())
    assert [result["request_rate"] for result in results] == [50.0, "inf"]
    for result in results:
        assert (result["model_id"], result["completed"], result["failed"]) == ("tiny", 4, 0)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 20)
        assert 0 < result["mean_ttft_ms"] <= result["mean_e2el_ms"] < 1e3 * result["duration"]
        # a token is seen as it comes, though its text may be half a character; several at once where the reader is late
        assert result["output_lens"] == [5] * 4 and all(len(itls) <= 4 for itls in result["itls"])


@pytest.mark.parametrize("how", [["--backend", "openai-chat"], ["--endpoint", "/v1/chat/completions"]])
def test_serve_measures_chats_of_the_lengths_asked_for(url, tmp_path, how):
    flags = ["--base-url", url, "--json", str(tmp_path / "r.json"), "--save-detailed", "--save-result"]
    assert main(["serve", *SHORT, *how, *flags, "--result-dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["endpoint_type"], result["completed"], result["failed"]) == ("openai-chat", 4, 0)
    assert result["input_lens"] == [6] * 4 and result["output_lens"] == [5] * 4
    assert all(0 < ttft <= result["duration"] for ttft in result["ttfts"])
    (kept,) = tmp_path.glob("openai-chat-infqps-tiny-*.json")
    assert json.loads(kept.read_text()) == result


def test_chats_need_a_tokenizer_that_is_here(url, tmp_path, capsys):
    flags = ["--base-url", url, "--backend", "openai-chat", "--tokenizer", str(tmp_path / "absent")]
    assert main(["serve", *SHORT, *flags]) == 1
    assert "error: chats need the model's tokenizer: give it with --tokenizer (model " in capsys.readouterr().err


def test_serve_counts_and_shows_the_requests_that_fail(url, tmp_path, capsys):
    (tmp_path / "trace.csv").write_text("arrival_ms,input,output\n0,6,5\n10,600,5\n20,6,5\n")
    flags = ["--trace", str(tmp_path / "trace.csv"), "--base-url", url, "--vocab-size", "256"]
    assert main(["serve", *flags, "--json", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr()
    assert "Failed requests:                         1" in printed.out
    assert "1 of 3 requests failed; the first was request 1: HTTP 400: This model's maximum context" in printed.err
    assert json.loads((tmp_path / "r.json").read_text())["request_rate"] == "trace"


def test_a_request_to_warm_up_finds_what_every_request_would_fail_of(url, capsys):
    assert main(["serve", *SHORT, "--base-url", url, "--model", "other"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "a request to warm up failed: HTTP 404: the model 'other' is not served here" in line


def test_serve_starts_a_server_and_ends_it(engine_flags, tmp_path, capsys):
    flags = ["--vocab-size", "256", "--json", str(tmp_path / "r.json")]
    assert main(["serve", "--start", *SHORT, *flags, "--", *engine_flags]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 4
    url = capsys.readouterr().out.splitlines()[0].rpartition(" ")[2]
    assert main(["serve", *SHORT, "--base-url", url]) == 1
    assert capsys.readouterr().err == f"error: cannot connect to {url}: Connection refused\n"


def test_throughput_computes_every_token_asked_for(engine_flags, tmp_path, capsys):
    flags = ["--prefix-len", "16", "--num-prefixes", "2", "--json", str(tmp_path / "r.json")]
    assert main(["throughput", *SHORT, *flags, *engine_flags]) == 0
    printed = capsys.readouterr()
    assert "Total num output tokens:  20" in printed.out and "requests/s" in printed.out
    assert "warning" not in printed.err
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (88, 20)
    assert numbers["requests_per_second"] == pytest.approx(4 / numbers["elapsed_time"])


def test_latency_is_of_whole_batches(engine_flags, tmp_path, capsys):
    flags = ["--batch-size", "2", "--input-len", "6", "--output-len", "4", "--num-iters", "3"]
    assert main(["latency", *flags, "--json", str(tmp_path / "r.json"), *engine_flags]) == 0
    printed = capsys.readouterr()
    assert "99% percentile latency: " in printed.out and "warning" not in printed.err
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert len(numbers["latencies"]) == 3
    assert numbers["avg_latency"] == pytest.approx(sum(numbers["latencies"]) / 3)


def test_a_warm_start_tells_its_first_token_and_compiles_nothing(engine_flags, tmp_path, capsys):
    for _ in range(2):  # the first fills the cache where no other test has
        assert main(["startup", "--warm-only", "--json", str(tmp_path / "r.json"), *engine_flags]) == 0
        result = json.loads((tmp_path / "r.json").read_text())["warm"]
        if result["programs_compiled"] == 0:
            break
    assert "Warm start, programs compiled: 0 of 3" in capsys.readouterr().out
    seconds = result["seconds"]
    assert 0 < seconds["import"] < seconds["loaded"] < seconds["first_token"] and seconds["loaded"] < seconds["ready"]


@pytest.mark.parametrize(
    "argv, why",
    [
        (["serve", "--request-rate", "-1"], "a rate must be over 0"),
        (["serve", "--request-rate", "1,x"], "must be a number, got 'x'"),
        (["serve", "--burstiness", "0"], "must be over 0"),
        (["serve", "--random-range-ratio", "1"], "must be in [0, 1)"),
        (["serve", "--trace", "/absent.csv"], "/absent.csv: No such file or directory"),
        (["serve", "--base-url", "here"], "looks like http"),
        (["serve", "--plot", "x.png", "--request-rate", "4"], "give several rates"),
        (["serve", "--backend", "openai", "--endpoint", "/v1/chat/completions"], "--backend openai is for /v1/comp"),
        (["serve", "--backend", "openai-chat", "--endpoint", "/v1/completions"], "openai-chat is for /v1/chat/compl"),
        (["serve", "--", "--model", "x"], "serve --start"),
        (["latency", "--batch-size", "0"], "must be at least 1"),
        (["throughput", "--model", "/absent.gguf"], "/absent.gguf"),
        (["startup", "--compilation-cache-dir", "x"], "needs --warm-only"),
        ([], "required"),
    ],
)
def test_bad_input_is_one_line(argv, why, capsys):
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code
    stderr = capsys.readouterr().err
    assert status in (1, 2) and why in stderr and stderr.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_the_measurement(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["serve", "--plot", "x.png", "--request-rate", "1,2"]) == 1
    assert capsys.readouterr().err == "error: --plot needs matplotlib: pip install 'jpaged[bench]'\n"
