"""The pool's shape, size and sharding, and that its physical form holds what was meant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import PoolLayout
from pallas_kernels.layout import logical_kv, pool_from_logical


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_per_block_is_what_a_pool_takes(dtype, itemsize):
    layout = PoolLayout(num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype)
    pool = layout.make_pool(10)
    assert layout.bytes_per_block == 2 * 3 * 64 * 16 * itemsize
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == 10 * layout.bytes_per_block
    assert pool.dtype == jnp.dtype(dtype) and pool.num_blocks == 10 and pool.block_size == 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_struct_describes_the_pool(dtype):
    layout = PoolLayout(2, 80, 32, dtype)
    pool, struct = layout.make_pool(5), layout.pool_struct(5)
    assert jax.tree.structure(pool) == jax.tree.structure(struct)
    for made, described in zip(jax.tree.leaves(pool), jax.tree.leaves(struct)):
        assert (made.shape, made.dtype) == (described.shape, described.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_physical_form_keeps_every_number(dtype):
    layout = PoolLayout(3, 8, 4, dtype)
    k, v = np.random.default_rng(0).integers(-99, 99, (2, 6, 4, 3, 8)).astype(np.float64)
    got_k, got_v = logical_kv(pool_from_logical(k, v, layout))
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)


def test_partition_spec_shards_kv_heads():
    layout = PoolLayout(2, 8, 4, "float32")
    assert layout.partition_spec("model") == PartitionSpec(None, "model")
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    sharding = NamedSharding(mesh, layout.partition_spec("model"))
    for leaf in jax.tree.leaves(layout.make_pool(3, sharding)):
        assert leaf.sharding == sharding and leaf.shape[1] == 2
    for leaf in jax.tree.leaves(layout.pool_struct(3, sharding)):
        assert leaf.sharding == sharding


def test_refuses_impossible_layouts():
    with pytest.raises(ValueError, match="float32, bfloat16, got 'int4'"):
        PoolLayout(2, 8, 4, "int4")
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        PoolLayout(2, 8, 0, "float32")
    with pytest.raises(ValueError, match="at least 2 .*, got 1"):
        PoolLayout(2, 8, 4, "float32").make_pool(1)
