"""Sharded over KV heads, the ops give the same bits on 1, 2, 4 and 8 devices: each owns its heads, and nothing is sent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a process each

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
sys.path.insert(0, sys.argv[1])
from attention_cases import Case, make_step
from pallas_kernels import PoolLayout, copy_blocks, kv_write, ragged_paged_attention
from pallas_kernels.pool import logical_kv, pool_from_logical

form, dtype = sys.argv[2:]
case = Case("sharded", decode=(17, 40), prefill=((20, 36),), num_heads=16, num_kv_heads=8, dtype=dtype, padded_to=24)
step = make_step(case)
rng = np.random.default_rng(1)
k, v = rng.standard_normal((2, 24, 8, 64)).astype(np.float32)
slots = np.zeros(24, np.int32)
slots[:3] = 16 * (step.pool.num_blocks - 1) + np.arange(3)  # into a block that nobody attends to
src, dst = np.array([1, 2], np.int32), np.array([step.pool.num_blocks - 2, 0], np.int32)
scale = None if dtype == "float32" else jnp.asarray(rng.uniform(0.02, 0.05, 8), jnp.float32)
results = []
for size in (1, 2, 4, 8):
    layout = PoolLayout(8, 64, 16, dtype, form, num_shards=size)
    pool = pool_from_logical(*logical_kv(step.pool), layout)
    mesh = Mesh(np.array(jax.devices()[:size]), ("model",))
    heads, by_kv_head, per_head = P(None, "model"), layout.partition_spec("model"), P("model")

    def ops(q, k, v, pool, scale):
        pool = kv_write(pool, k, v, jnp.asarray(slots), k_scale=scale, v_scale=scale, implementation="xla")
        (pool,) = copy_blocks((pool,), jnp.asarray(src), jnp.asarray(dst), 1, implementation="xla")
        out = ragged_paged_attention(
            q, pool, step.meta, k_scale=scale, v_scale=scale, implementation="xla", **step.kwargs
        )
        return out, pool

    sharded = jax.jit(jax.shard_map(
        ops, mesh=mesh, in_specs=(heads, heads, heads, by_kv_head, per_head), out_specs=(heads, by_kv_head), check_vma=False
    ))
    text = sharded.lower(step.q, k, v, pool, scale).compile().as_text()
    assert not any(word in text for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
    out, pool = sharded(step.q, k, v, pool, scale)
    assert len(out.sharding.device_set) == size
    results.append((np.asarray(out), *logical_kv(pool)))
for others in results[1:]:
    for one, other in zip(results[0], others):
        np.testing.assert_array_equal(one, other)
assert np.isfinite(results[0][0]).all() and np.abs(results[0][0]).max() > 0.1
assert not np.array_equal(results[0][1][-1], logical_kv(step.pool)[0][-1], equal_nan=True), "nothing was written"
"""


@pytest.mark.parametrize(("form", "dtype"), [("cpu", "float32"), ("cpu", "int8"), ("gpu", "float32"), ("tpu", "float32")])
def test_any_mesh_gives_the_bits_of_one_device(form, dtype):
    folder = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder.parents[1])
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), form, dtype], env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-3000:]
