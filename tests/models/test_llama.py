"""Layers as a loop over one pool, and layers in a row with a pool each, are the same model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.model_runner import make_mesh
from jpaged.packed_step import PackedStep
from models.config import ModelConfig
from models.llama import Llama
from pallas_kernels import PoolLayout, make_pool

CONFIG = ModelConfig("llama", "tiny", 64, 32, 48, 3, 4, 2, 8, 128, tie_word_embeddings=True)
NUM_BLOCKS, BLOCK = 5, 16


def run(roll_layers: bool) -> np.ndarray:
    layout = PoolLayout(CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK, "float32")
    mesh = make_mesh(1)
    build = functools.partial(Llama, CONFIG, layout, dtype=jnp.dtype("float32"), mesh=mesh, roll_layers=roll_layers)
    graphdef, state = nnx.get_abstract_model(build, mesh)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    state = jax.tree.unflatten(treedef, [jax.random.normal(k, x.shape) / 6 for k, x in zip(keys, leaves)])
    num_pools = 1 if roll_layers else CONFIG.num_layers
    pools = tuple(make_pool(layout, NUM_BLOCKS * CONFIG.num_layers // num_pools) for _ in range(num_pools))
    _, batch, _ = PackedStep(num_tokens=8, num_rows=2, num_seqs=2, max_blocks=4).empty()
    batch.logits_indices[:] = 3, 7
    meta = batch.attention
    meta.query_start_loc[1:] = 8
    meta.distribution[:] = 0, 0, 1
    logits = []
    for step in range(3):  # the later ones read what the earlier ones wrote
        batch.token_ids[:] = np.arange(8) * 7 % 64
        batch.positions[:] = np.arange(8) + 8 * step
        meta.seq_lens[0] = 8 * step + 8
        meta.block_tables[0, :2] = 3, 2
        meta.slot_mapping[:] = np.array([3, 2])[batch.positions // BLOCK] * BLOCK + batch.positions % BLOCK
        fixed = jax.tree.map(jnp.array, batch)
        out, pools = jax.jit(lambda s, b, p: nnx.merge(graphdef, s)(b, p))(state, fixed, pools)
        logits.append(np.asarray(out))
    return np.stack(logits)


def test_layers_in_a_row_with_a_pool_each_give_what_the_loop_over_one_pool_gives():
    rolled, in_a_row = run(True), run(False)
    assert np.abs(rolled).max() > 0.1 and np.ptp(rolled[:, 1], axis=0).max() > 1e-3
    np.testing.assert_allclose(in_a_row, rolled, atol=1e-5)
