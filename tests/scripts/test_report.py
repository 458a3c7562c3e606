"""Every script tells how it is used, and in one line what is wrong."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench_scheduler import PARTS, run_decodes

from jpaged.bench.results import spread

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
NAMES = (
    "bench_throughput", "bench_pool_size", "bench_scheduler", "bench_kv_waste", "eval_gsm8k",
    "make_synthetic_trace", "bench_kernels", "tune_tiles",
)  # fmt: skip


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", *arguments], capture_output=True, text=True, timeout=60
    )


def test_every_script_has_a_help():
    with ThreadPoolExecutor(2) as threads:
        for name, done in zip(NAMES, threads.map(lambda name: run(name, "--help"), NAMES)):
            assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}.py"), (name, done.stderr)


@pytest.mark.parametrize(
    "name, arguments, why",
    [
        ("bench_scheduler", ["--num-seqs", "32,x"], "'x'"),
        ("bench_kv_waste", ["--trace", "/absent.csv"], "/absent.csv"),
        ("eval_gsm8k", ["--data", "/absent"], "give its folder with --data or JPAGED_DATA"),
        ("bench_kernels", ["--interpret"], "--interpret needs --tiny"),
    ],
)
def test_bad_input_is_one_line(name, arguments, why):
    done = run(name, *arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert any("error: " in line and why in line for line in done.stderr.splitlines()), done.stderr


def test_a_spread_is_the_median_and_both_ends():
    assert spread([3, 1, 2]) == "2.0 (1.0 to 3.0)"


def test_the_scheduler_benchmark_times_steps_of_decodes_alone():
    times = run_decodes(num_seqs=5, prompt_len=40, num_steps=20, block_size=16)
    assert {part: len(t) for part, t in times.items()} == dict.fromkeys(PARTS, 20)
