"""Layers as a loop over one pool, and layers in a row with a pool each, are the same model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.model_runner import make_mesh
from models.config import ModelConfig
from models.llama import Llama
from models.types import ForwardBatch
from pallas_kernels import AttentionMetadata, PoolLayout, make_pool

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
    forward = jax.jit(lambda s, b, p: nnx.merge(graphdef, s)(b, p))
    logits = []
    for step in range(3):  # the later ones read what the earlier ones wrote
        positions = np.arange(8) + 8 * step
        meta = AttentionMetadata(
            seq_lens=jnp.array([8 * step + 8, 0]),
            query_start_loc=jnp.array([0, 8, 8]),
            block_tables=jnp.array([[3, 2, 0, 0], [0, 0, 0, 0]]),
            distribution=jnp.array([0, 0, 1]),
            slot_mapping=jnp.asarray(np.array([3, 2])[positions // BLOCK] * BLOCK + positions % BLOCK),
        )
        batch = ForwardBatch(jnp.arange(8) * 7 % 64, jnp.asarray(positions), (meta,), jnp.array([3, 7]))
        out, pools = forward(state, batch, pools)
        logits.append(np.asarray(out))
    return np.stack(logits)


def test_layers_in_a_row_with_a_pool_each_give_what_the_loop_over_one_pool_gives():
    rolled, in_a_row = run(True), run(False)
    assert np.abs(rolled).max() > 0.1 and np.ptp(rolled[:, 1], axis=0).max() > 1e-3
    np.testing.assert_allclose(in_a_row, rolled, atol=1e-5)
