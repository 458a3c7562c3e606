"""The peer harness's own arithmetic, and its workers' protocol: no peer is needed."""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parent.parent.parent / "scripts" / "peers"
sys.path.insert(0, str(PEERS))

import peer
from compare import NEVER, ONCE, Comparison, chosen, commands, takes_part
from last_words import last_error
from peer import EXPORTED_LAST, MODEL, Peer
from process import WorkerProcess
from table import BARS, COLUMNS, JPAGED, LLAMA_CPP, NOT_ASKED_FOR, TRANSFORMERS, TRANSFORMERS_MODES, VLLM, Results
from tqdm import tqdm
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
    table = results.table({LLAMA_CPP: "not installed"})
    assert "1.25 (1.00 to 2.00) meets 1.2" in table
    assert "1.11 MISSES 2.5" in table and "not installed" in table and "crashed" not in table


def cells(table: str, number: int) -> list[str]:
    """The only row of one of its parts: the ratios, or the rates."""
    return re.split("  +", table.split("\n\n")[number].splitlines()[1])


def test_the_table_says_crashed_and_why_of_what_has_crashed():
    results = Results()
    results.add("w", JPAGED, 0, 100)
    why = f"crashed: {'ValueError: ' * 9}; see /the/log"
    table = results.table({VLLM: why, LLAMA_CPP: "installation failed: no wheel; see /a/log"})
    assert cells(table, 0)[1:] == [f"{why[:45]}...", "installation failed: no wheel; see /a/log", "-"]
    assert cells(table, 1)[1:] == ["100", "crashed", "installation failed", "-", "-"]
    assert f"{VLLM}: {why}" in table.splitlines()


def test_a_way_of_transformers_that_crashed_is_not_hidden_by_the_other():
    results, (first, second) = Results(), TRANSFORMERS_MODES
    results.add("w", JPAGED, 0, 100)
    assert cells(results.table({first: "crashed: x"}), 0)[-1] == "crashed: x"  # the other one never runs this workload
    assert cells(results.table({first: "crashed: x", second: NOT_ASKED_FOR}), 0)[-1] == "crashed: x"
    results.add("w", second, 0, 50)
    assert cells(results.table({first: "crashed: x"}), 0)[-1] == f"2.00; {first} crashed"


def test_ratios_of_fewer_rounds_than_were_asked_for_say_so():
    results = Results()
    for name in (JPAGED, VLLM):
        results.add("w", name, 0, 100)
        results.add("earlier", name, 0, 100)
    results.cut.add(("w", VLLM))
    rows = results.table({VLLM: "crashed: x"}).splitlines()
    assert re.split("  +", rows[1])[1] == f"1.00; {VLLM} crashed" and re.split("  +", rows[2])[1] == "1.00"


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
    with pytest.raises(ValueError, match="^d: installation failed: no wheel$"):
        chosen("d", {"a": 1}, missing={"d": "installation failed: no wheel"})


def fake(folder: Path, text: str) -> list[str]:
    """The command of a worker that is this text."""
    script = folder / f"fake{len(list(folder.iterdir()))}.py"
    script.write_text(textwrap.dedent(text))
    return [sys.executable, str(script)]


@pytest.fixture
def worker(tmp_path):
    process = WorkerProcess(fake(tmp_path, WORKER.format(folder=str(PEERS))), {}, tmp_path / "log")
    yield process
    process.close()


def test_a_worker_answers_in_lines_whatever_else_is_printed(worker, tmp_path):
    assert worker.wait_until_ready() == "settings"
    assert worker.run({"prompts": [[1, 2]], "output_lens": [2]}) >= 0
    with pytest.raises(OSError, match=r"asked for \[3\] tokens, got \[2\]"):
        worker.run({"prompts": [[1, 2]], "output_lens": [3]})
    assert (tmp_path / "log").read_text() == "noise\n" + 2 * "more noise\n"


ANSWER = '{"seconds": 1, "num_output_tokens": [2]}'
READY = """print('{"ready": "settings"}', flush=True)"""
RUNS_OUT = "raise MemoryError('no room')"
SAYS = "import sys; print('loading', file=sys.stderr);"
AT_START = {
    "its package is absent": (
        "import absent_package", "ModuleNotFoundError: No module named 'absent_package' (exit status 1)"
    ),
    "it exits": (f"{SAYS} sys.exit('no such device')", "no such device (exit status 1)"),
    "it ends well": (f"{SAYS} sys.exit(0)", "it ended without an answer, its last words: loading"),
    "it is killed": (
        f"{SAYS} import os; os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory?), its last words: loading"
    ),
    "it aborts": ("import os; os.abort()", "killed by SIGABRT, its last words: nothing in its log"),
    "it prints": (f"{SAYS} print('INFO hello')", "its answer was 'INFO hello'"),
    "it says a list": ("print([1])", "its answer was '[1]'"),
    "it says half": ("""print('{"read')""", """its answer was '{"read'"""),
    "it hangs": (
        "import sys; print('half', end='', flush=True); sys.stdin.read()",
        "no answer in 0.5 s, its last words: nothing in its log",
    ),
    "a child of it holds the pipe": (
        "import subprocess; subprocess.Popen(['sleep', '60'], stdout=1); 1 / 0",
        "ZeroDivisionError: division by zero (exit status 1)",
    ),
}  # fmt: skip
WHEN_ASKED = {
    "it raises": (f"input(); {RUNS_OUT}", "MemoryError: no room (exit status 1)"),
    "it ends unasked": (RUNS_OUT, "MemoryError: no room (exit status 1)"),
    "it says a list": ("input(); print('[]')", "its answer was '[]'"),
    "it says half": ("""input(); print('{"seconds": 1}')""", """its answer was '{"seconds": 1}'"""),
    "it hangs": ("input(); import time; time.sleep(60)", "no answer in 0.5 s, its last words: nothing in its log"),
    "it does not read": ("import time; time.sleep(60)", "no answer in 0.5 s, its last words: nothing in its log"),
}  # fmt: skip


def close_now(process: WorkerProcess) -> None:
    """Without waiting for those that hang."""
    process._signal(signal.SIGKILL)
    process.close()


def timeout_for(why: str) -> float:
    """Short only where it is waited for: machines are slow at times."""
    return 0.5 if "no answer" in why else 60


@pytest.mark.parametrize("text, why", AT_START.values(), ids=AT_START)
def test_a_worker_that_does_not_start_has_crashed_and_says_why(tmp_path, text, why):
    process = WorkerProcess(fake(tmp_path, text), {}, tmp_path / "log", timeout_for(why))
    with pytest.raises(OSError, match=f"^{re.escape(f'crashed: {why}; see {tmp_path}/log')}$"):
        process.wait_until_ready()
    close_now(process)


@pytest.mark.parametrize("text, why", WHEN_ASKED.values(), ids=WHEN_ASKED)
def test_a_worker_that_fails_at_a_request_has_crashed_and_says_why(tmp_path, text, why):
    process = WorkerProcess(fake(tmp_path, f"{READY}\n{text}"), {}, tmp_path / "log", 60)
    process.wait_until_ready()
    process.timeout = timeout_for(why)
    request = {"prompts": [[1] * 100_000], "output_lens": [1]}  # more than a pipe holds
    with pytest.raises(OSError, match=f"^{re.escape(f'crashed: {why}; see {tmp_path}/log')}$"):
        process.run(request)
    close_now(process)


def test_a_worker_that_was_killed_while_it_slept_has_crashed(worker):
    worker.wait_until_ready()
    os.killpg(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    with pytest.raises(OSError, match=r"crashed: killed by SIGKILL \(out of memory\?\), its last words: noise; see "):
        worker.ask({})


def test_a_worker_whose_python_is_gone_has_crashed(tmp_path):
    with pytest.raises(OSError, match=r"^crashed: it cannot be started: .*No such file.*/absent/python.*; see "):
        WorkerProcess(["/absent/python"], {}, tmp_path / "log")


@pytest.mark.parametrize(
    "log, line",
    [
        ("ValueError: no\n/x/resource_tracker.py:254: UserWarning: leaked\n  warnings.warn(", "ValueError: no"),
        ("(Core pid=7) torch.OutOfMemoryError: no room\nbye\n\n", "(Core pid=7) torch.OutOfMemoryError: no room"),
        ("ERROR: No matching distribution found for x\nhint: see above", "ERROR: No matching distribution found for x"),
        ("0%\rError: no room\r50%", "Error: no room"),
        ("terminate called\n  what():  std::bad_alloc\n", "what():  std::bad_alloc"),
    ],
)
def test_the_last_error_of_a_log_is_found_before_the_warnings_that_follow_it(tmp_path, log, line):
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == line


def test_a_comparison_goes_on_without_the_peers_that_crash_and_tells_of_each(tmp_path):
    good = WORKER.format(folder=str(PEERS)).replace("len(prompts[0])", "2")
    texts = {
        JPAGED: good,
        VLLM: "raise RuntimeError('no such processor')",
        LLAMA_CPP: f"{READY}\nfor _ in range(2):\n    input()\n    print({ANSWER!r}, flush=True)\n{RUNS_OUT}",
    }
    wanted = {name: (fake(tmp_path, text), {}) for name, text in texts.items()}
    first, second = TRANSFORMERS_MODES
    wanted[first] = (["/absent/python"], {})
    comparison = Comparison(100, 0, {second: NOT_ASKED_FOR})
    try:
        comparison.start(wanted, tmp_path)
        comparison.measure(uniform(1, 2, 2), 3, tqdm(disable=True))
    finally:
        comparison.close()
    assert comparison.settings == {JPAGED: "settings", LLAMA_CPP: "settings"}
    assert len(comparison.results.ratios("1x(2+2)", LLAMA_CPP)) == 1
    table = comparison.results.table(comparison.missing)
    vllm, llama_cpp, transformers = cells(table, 0)[1:]
    assert vllm == "crashed: RuntimeError: no such processor (exi..."
    assert llama_cpp.endswith("; llama.cpp crashed") and transformers.startswith("crashed: it cannot be started")
    assert f"{LLAMA_CPP}: crashed: MemoryError: no room (exit status 1); see {tmp_path}/llama.cpp-worker.log" in table
    assert f"{second}: not asked for" in table and "not installed" not in table


def test_without_jpaged_itself_there_is_no_comparison(tmp_path):
    comparison = Comparison(100, 0, {})
    with pytest.raises(OSError, match="^jpaged: crashed: ZeroDivisionError: division by zero "):
        comparison.start({JPAGED: (fake(tmp_path, "1 / 0"), {})}, tmp_path)


@pytest.fixture
def a_python(tmp_path, monkeypatch):
    """Makes the only Python that peers can be installed with one whose environments' own runs this shell script."""

    def make(pip: str) -> None:
        python = tmp_path / "python"
        inner = '"$3/bin/python"'
        python.write_text(
            f"#!/bin/sh\nmkdir -p \"$3/bin\"; printf '#!/bin/sh\\n{pip}\\n' > {inner}; chmod +x {inner}"
        )
        python.chmod(0o755)
        monkeypatch.setattr(peer, "pythons", lambda: [str(python)])

    return make


def test_an_installation_that_failed_is_not_the_same_as_none(tmp_path, a_python):
    some = Peer("some", "worker.py", ("a-package",), reads_export=False)
    assert some.why_absent(tmp_path) == "not installed"
    a_python("echo ERROR: no matching wheel; exit 1")
    why = f"ERROR: no matching wheel; see {tmp_path}/some.log"
    with pytest.raises(OSError, match=f"^some cannot be installed here: {re.escape(why)}$"):
        some.install(tmp_path)
    assert some.why_absent(tmp_path) == f"installation failed: {why}"
    a_python("exit 0")
    some.install(tmp_path)
    assert some.why_absent(tmp_path) is None


def test_an_installation_that_was_cut_short_is_a_failed_one(tmp_path, a_python, monkeypatch):
    some = Peer("some", "worker.py", ("a-package",), reads_export=False)
    a_python("exit 1")
    (python,) = peer.pythons()

    def then_interrupted():
        yield python
        raise KeyboardInterrupt

    monkeypatch.setattr(peer, "pythons", then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        some.install(tmp_path)
    assert some.why_absent(tmp_path) == f"installation failed: it did not come to its end; see {tmp_path}/some.log"


def test_a_peer_whose_weights_could_not_be_exported_is_not_called_absent(tmp_path):
    for one in peer.PEERS:
        (tmp_path / one.name).mkdir()
        (tmp_path / one.name / ".installed").touch()
    (tmp_path / "model.log").write_text("ValueError: no such model\n")
    model = tmp_path / "model.gguf"
    model.touch()
    found, missing = commands(tmp_path, str(model))
    why = f"installation failed: no weights were exported: ValueError: no such model; see {tmp_path}/model.log"
    assert list(found) == [JPAGED, LLAMA_CPP] and missing == dict.fromkeys((VLLM, *TRANSFORMERS_MODES), why)
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / EXPORTED_LAST).touch()
    found, missing = commands(tmp_path, str(model))
    assert list(found) == [JPAGED, VLLM, LLAMA_CPP, *TRANSFORMERS_MODES] and not missing


def test_installing_goes_on_where_the_weights_cannot_be_exported(tmp_path):
    for one in peer.PEERS:
        (tmp_path / one.name).mkdir()
        (tmp_path / one.name / ".installed").touch()
    command = [sys.executable, PEERS / "install.py", "--folder", tmp_path, "--model", "/absent.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stderr.startswith("the weights of /absent.gguf cannot be exported: ")
    assert f"; see {tmp_path}/model.log" in done.stderr


def test_no_comparison_without_the_engines_that_were_asked_for():
    command = [sys.executable, PEERS / "compare.py", "--folder", "/absent", "--workloads", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "error: there is no 'none'" in done.stderr and "Traceback" not in done.stderr
