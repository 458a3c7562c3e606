"""The kernels' benchmark and tuner run, wherever they are run: every op once, in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_steps import LLAMA_8B, SMOLLM2, Case, full_pool, make_metadata

from pallas_kernels.paged_attention import attention_implementations
from pallas_kernels.pool import logical_kv

ROOT = Path(__file__).resolve().parent.parent.parent


def run(script: str, *arguments) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "scripts" / script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.slow  # every kernel's interpreter
def test_every_kernel_runs_in_small_and_leaves_its_numbers(tmp_path):
    done = run("bench_kernels.py", "--tiny", "--interpret", "--json", tmp_path / "numbers.json")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    measured = {(row["form"], row["op"]) for row in numbers["rows"]}
    for form in ("cpu", "gpu", "tpu"):
        best = next(iter(attention_implementations(form)))
        assert (form, "kv_write") in measured
        assert (form, best) in measured or (form != "cpu" and best == "xla")
    assert {"yardsticks_before", "yardsticks_after"} <= numbers.keys()


def test_the_tuner_tries_every_size_by_the_tables_own_way(tmp_path):
    table = tmp_path / "tiles.json"
    table.write_text('{"other": {"tiles": {}}}')
    done = run("tune_tiles.py", "--tiny", "--only", "decode", "--block-size", "128", "--output", table)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "partition': 128}: " in done.stdout and "us by the heuristic" in done.stdout
    assert "{'partition': 64}: ValueError: tiles.partition must be a multiple of block_size = 128" in done.stdout
    assert "other" in json.loads(table.read_text())


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("case", [Case(SMOLLM2, 3, 20), Case(SMOLLM2, 2, 40, queries=8)], ids=lambda case: case.name)
def test_a_step_names_each_block_once_and_writes_its_last_tokens(case, is_random):
    meta = make_metadata(case, 16, (4, 64), is_random=is_random)
    held = -(-case.context // 16)
    named = np.asarray(meta.block_tables)[: case.batch, :held].ravel()
    assert sorted(named) == list(range(1, case.blocks(16)))
    assert (list(named) == sorted(named)) == (not is_random)
    last = np.asarray(meta.slot_mapping).reshape(case.batch, case.queries)[:, -1]
    assert list(last // 16) == list(np.asarray(meta.block_tables)[: case.batch, held - 1])
    assert set(last % 16) == {(case.context - 1) % 16}
    assert int(meta.query_start_loc[-1]) == case.batch * case.queries == len(meta.slot_mapping)


def test_bytes_and_flops_by_hand():
    decode, prefill = Case(LLAMA_8B, 64, 4096), Case(LLAMA_8B, 1, 4, queries=3)
    assert decode.kv_bytes == 2**30 and decode.needed_bytes == 2**30 + 2 * 2 * 64 * 32 * 128
    assert decode.flops == 4 * 32 * 128 * 64 * 4096
    assert prefill.flops == 4 * 32 * 128 * (2 + 3 + 4)


@pytest.mark.parametrize(("form", "dtype"), [("cpu", "bfloat16"), ("gpu", "int8"), ("tpu", "float8_e4m3fn")])
def test_a_pool_is_full_of_numbers_of_size_one(form, dtype):
    case = Case(SMOLLM2, 1, 20, dtype=dtype)
    keys, values = logical_kv(full_pool(case.layout(form, 16), 4))
    scale = 1 if dtype == "bfloat16" else 0.04
    for numbers in (keys, values):
        assert np.isfinite(numbers).all() and numbers.std() * scale == pytest.approx(1, rel=0.05)
