"""One device equals a mesh of devices: weights, pool and attention shared out over KV heads."""

import json
import os
import subprocess
import sys

import pytest
from tiny_model import make_tiny_model

SCRIPT = """
import json, re, sys
from engines import Request, make_engine, run
from jpaged.sampling_params import SamplingParams
folder, programs_dir, size, kv_cache_dtype = sys.argv[1:]
engine = make_engine(folder, programs_dir, tensor_parallel_size=int(size), kv_cache_dtype=kv_cache_dtype)
assert len(engine.runner.state.pools[0].arrays[0].sharding.device_set) == int(size)
if int(size) > 1:
    step, spec = engine.runner.step, engine.runner.spec
    arguments = step.arguments((8, 8), spec.num_blocks, spec.table_width)
    slots = ",".join(map(str, engine.runner.state.edits.seen.shape))
    compiled = step.jitted((8, 8)).lower(*arguments).compile().as_text()
    gathers = re.findall(r"= \\w+\\[([\\d,]+)\\]\\S* all-gather", compiled)
    assert slots not in gathers, "what the sampler keeps of the vocabulary is gathered"
kinds = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "n": 3},
    {"temperature": 0, "presence_penalty": 1.5, "bad_words": ["a"], "prompt_logprobs": 2},
    {"repetition_penalty": 1.3, "logit_bias": {7: 2}, "seed": 4, "logits_processors": [lambda ids, row: row]},
]
requests = [
    Request(list(range(3, 3 + length)), SamplingParams(max_tokens=16, ignore_eos=True, **kind))
    for length, kind in zip((1, 16, 40, 71), kinds)
]
print(json.dumps([output.token_ids for output in run(engine, requests)]))
"""


def generate(folder, programs_dir, size: int, kv_cache_dtype: str) -> list[list[int]]:
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={size}",
        "PYTHONPATH": os.path.dirname(make_tiny_model.__code__.co_filename),
    }
    command = [sys.executable, "-c", SCRIPT, str(folder), programs_dir, str(size), kv_cache_dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8"))]
)
def test_two_devices_give_the_tokens_of_one(tmp_path, programs_dir, kv_cache_dtype):
    folder = make_tiny_model(tmp_path)
    two, one = (generate(folder, programs_dir, size, kv_cache_dtype) for size in (2, 1))
    assert two == one
