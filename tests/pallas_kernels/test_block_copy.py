"""`copy_blocks` copies the pairs that it is told to, in every layer, in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PoolLayout, copy_blocks, pool_struct, put_blocks, take_blocks
from pallas_kernels.pool import logical_kv, pool_from_logical

SIZE = 9  # blocks of a layer


def _pools(layout, layers):
    rng = np.random.default_rng(0)
    shape = SIZE, layout.block_size, layout.num_kv_heads, layout.head_dim
    return tuple(
        pool_from_logical(*rng.integers(-9, 9, (2, count * SIZE, *shape[1:])).astype(np.float64), layout)
        for count in layers
    )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["cpu", "gpu", "tpu"])
def test_copies_the_first_pairs_in_every_layer_and_nothing_else(form, dtype, implementation):
    pools = _pools(PoolLayout(3, 64, 16, dtype, form), layers=(2, 3))
    src, dst = np.asarray([1, 2, 3, 0], np.int32), np.asarray([5, 6, 7, 0], np.int32)
    run = jax.jit(functools.partial(copy_blocks, blocks_per_layer=SIZE, implementation=implementation))
    for num in (0, 2, 3):
        for old, new in zip(pools, run(pools, src, dst, num)):
            for before, after in zip(logical_kv(old), logical_kv(new)):
                want = before.reshape(-1, SIZE, *before.shape[1:]).copy()
                want[:, dst[:num]] = want[:, src[:num]]
                np.testing.assert_array_equal(after, want.reshape(before.shape))


def test_a_pool_is_one_layer_unless_said_otherwise():
    (pool,) = _pools(PoolLayout(2, 8, 4, "float32"), layers=(1,))
    (got,) = copy_blocks((pool,), jnp.asarray([1]), jnp.asarray([8]), 1)
    for before, after in zip(logical_kv(pool), logical_kv(got)):
        np.testing.assert_array_equal(after[8], before[1])
        np.testing.assert_array_equal(after[:8], before[:8])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_donated_pools_are_not_copied(dtype):
    layout = PoolLayout(3, 64, 16, dtype)
    pools = pool_struct(layout, 4096), pool_struct(layout, 2048)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    run = jax.jit(functools.partial(copy_blocks, blocks_per_layer=1024), donate_argnums=0)
    memory = run.lower(pools, ids, ids, 3).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 6144 * layout.bytes_per_block
    assert memory.temp_size_in_bytes < 0.05 * memory.alias_size_in_bytes


def test_refuses_what_does_not_fit():
    layout = PoolLayout(2, 8, 4, "float32")
    (pool,) = _pools(layout, layers=(1,))
    ids = jnp.asarray([1])
    with pytest.raises(ValueError, match=r"src and dst must be \[C\] alike, got \(1,\) and \(2,\)"):
        copy_blocks((pool,), ids, jnp.asarray([1, 2]), 1)
    with pytest.raises(ValueError, match="blocks_per_layer must divide num_blocks = 9, got 4"):
        copy_blocks((pool,), ids, ids, 1, blocks_per_layer=4)
    (other,) = _pools(dataclasses.replace(layout, form="tpu"), layers=(1,))
    with pytest.raises(ValueError, match="of one form, got cpu, tpu"):
        copy_blocks((pool, other), ids, ids, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["cpu", "gpu", "tpu"])
def test_blocks_come_back_bit_for_bit_wherever_they_have_been(form, dtype):
    pools = _pools(PoolLayout(3, 64, 16, dtype, form), layers=(2, 3))
    rng = np.random.default_rng(1)
    noise = [rng.integers(0, 256, array.nbytes, np.uint8) for pool in pools for array in pool.arrays]
    leaves, tree = jax.tree.flatten(pools)  # every bit pattern there is, NaNs included
    pools = tree.unflatten([bits.view(leaf.dtype).reshape(leaf.shape) for bits, leaf in zip(noise, leaves)])
    take, put = (jax.jit(functools.partial(f, blocks_per_layer=SIZE)) for f in (take_blocks, put_blocks))
    source, target = np.asarray([2, 7, 3, 0], np.int32), np.asarray([5, 2, 0, 0], np.int32)
    taken = jax.device_put(take(pools, source), jax.devices()[0])
    for before, block, after in zip(*map(jax.tree.leaves, (pools, taken, put(pools, target, taken)))):
        layers = np.asarray(before).reshape(-1, SIZE, *before.shape[1:])
        np.testing.assert_array_equal(bits_of(block), bits_of(layers[:, source].reshape(block.shape)))
        want = layers.copy()
        want[:, target[:2]] = layers[:, source[:2]]
        got = np.asarray(after).reshape(want.shape)
        np.testing.assert_array_equal(bits_of(got[:, 1:]), bits_of(want[:, 1:]))  # but for the null block


def bits_of(array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_blocks_are_put_in_place(dtype):
    layout = PoolLayout(2, 64, 16, dtype)
    pools, taken = (pool_struct(layout, 64 * 4),), (pool_struct(layout, 8 * 4),)
    ids = jax.ShapeDtypeStruct((8,), np.int32)
    put = jax.jit(functools.partial(put_blocks, blocks_per_layer=64), donate_argnums=0)
    memory = put.lower(pools, ids, taken).compile().memory_analysis()
    num_bytes = layout.bytes_per_block * 64 * 4
    assert memory.alias_size_in_bytes == num_bytes and memory.temp_size_in_bytes < num_bytes // 4
