"""The peer harness's own arithmetic, and its workers' protocol: no peer is needed."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parent.parent.parent / "scripts" / "peers"
sys.path.insert(0, str(PEERS))

from compare import NEVER, ONCE, chosen, takes_part
from process import WorkerProcess
from table import BARS, COLUMNS, JPAGED, LLAMA_CPP, TRANSFORMERS, TRANSFORMERS_MODES, VLLM, Results
from worker import MAX_RUNNING
from workload import WARM_UP_TOKENS, uniform, workloads

WORKER = """
import sys
sys.path.insert(0, {folder!r})
from worker import serve_runs

def start():
    print("noise")
    def run(prompts, output_lens):
        print("more noise")
        return [len(prompts[0])] * len(output_lens)
    return "settings", run

serve_runs(start)
"""


def test_workloads_are_the_same_lengths_every_time_and_their_prompts_never_are():
    assert workloads() == workloads()
    assert all(len(load.lengths) <= MAX_RUNNING for load in workloads())
    load, rng = uniform(2, 5, 9), random.Random(0)
    first, second = load.request(rng, 100), load.request(rng, 100)
    assert first["prompts"] != second["prompts"] and first["output_lens"] == [9, 9]
    assert [len(prompt) for prompt in first["prompts"]] == [5, 5]
    assert load.request(rng, 100, is_warm_up=True)["output_lens"] == [WARM_UP_TOKENS] * 2


def test_bars_and_exceptions_name_workloads_and_engines_that_exist():
    names = {load.name for load in workloads()}
    assert {(load, peer) for load, peer in BARS} <= {(load, peer) for load in names for peer in COLUMNS}
    assert {load for load, _ in ONCE | NEVER} <= names
    assert {engine for _, engine in ONCE | NEVER} <= {LLAMA_CPP, *TRANSFORMERS_MODES}


def test_ratios_pair_runs_of_the_same_round():
    results = Results()
    for number, (ours, theirs) in enumerate([(100, 50), (60, 40), (90, 30)]):
        results.add("w", JPAGED, number, ours)
        results.add("w", VLLM, number, theirs)
    results.add("w", LLAMA_CPP, 0, 25)
    assert results.ratios("w", VLLM) == [2, 1.5, 3]
    assert results.ratios("w", LLAMA_CPP) == [4]


def test_transformers_counts_with_its_faster_way():
    results = Results()
    results.add("w", JPAGED, 0, 100)
    results.add("w", TRANSFORMERS_MODES[0], 0, 50)
    assert results.ratios("w", TRANSFORMERS) == [2]
    results.add("w", TRANSFORMERS_MODES[1], 0, 80)
    assert results.ratios("w", TRANSFORMERS) == [1.25]


def test_the_table_says_what_meets_its_bar_and_what_is_not_there():
    results = Results()
    for number, theirs in enumerate([50, 80, 100]):
        results.add("32x(128+128)", JPAGED, number, 100)
        results.add("32x(128+128)", VLLM, number, theirs)
    results.add("32x(128+128)", TRANSFORMERS_MODES[0], 0, 90)
    table = results.table({LLAMA_CPP: "why"})
    assert "1.25 (1.00 to 2.00) meets 1.2" in table
    assert "1.11 MISSES 2.5" in table and "not installed" in table


def test_slow_cells_run_once_and_only_vllm_runs_the_trace():
    load = uniform(64, 256, 128)
    assert [takes_part(LLAMA_CPP, load, number) for number in (-1, 0, 1)] == [True, True, False]
    assert takes_part(VLLM, load, 2)
    trace = workloads()[-1]
    assert takes_part(VLLM, trace, 2) and not takes_part(LLAMA_CPP, trace, 0)


def test_a_choice_keeps_the_order_and_refuses_what_is_not_there():
    assert list(chosen("c,b", {"a": 1, "b": 2, "c": 3}, always="a")) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no 'd'; there are a"):
        chosen("d", {"a": 1})


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(WORKER.format(folder=str(PEERS)))
    process = WorkerProcess([sys.executable, str(script)], {}, tmp_path / "log")
    yield process
    process.close()


def test_a_worker_answers_in_lines_whatever_else_is_printed(worker, tmp_path):
    assert worker.wait_until_ready() == "settings"
    assert worker.run({"prompts": [[1, 2]], "output_lens": [2]}) >= 0
    with pytest.raises(OSError, match=r"asked for \[3\] tokens, got \[2\]"):
        worker.run({"prompts": [[1, 2]], "output_lens": [3]})
    assert (tmp_path / "log").read_text() == "noise\n" + 2 * "more noise\n"


def test_a_worker_that_ends_is_an_error_of_one_line(worker):
    worker.wait_until_ready()
    with pytest.raises(OSError, match="the worker ended: see "):
        worker.ask({})


def test_no_comparison_without_the_engines_that_were_asked_for():
    command = [sys.executable, PEERS / "compare.py", "--folder", "/absent", "--workloads", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "error: there is no 'none'" in done.stderr and "Traceback" not in done.stderr
