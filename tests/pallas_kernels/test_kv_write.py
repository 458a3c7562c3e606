"""`kv_write` puts tokens where they belong, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PoolLayout, kv_write
from pallas_kernels.layout import logical_kv


def _tokens(num_tokens, layout, dtype="float32"):
    k, v = np.random.default_rng(0).standard_normal((2, num_tokens, layout.num_kv_heads, layout.head_dim))
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_each_token_to_its_slot_and_nothing_else(dtype, block_size, implementation):
    layout = PoolLayout(3, 64, block_size, dtype)
    pool = jax.tree.map(lambda leaf: leaf + 1, layout.make_pool(9))
    before = logical_kv(pool)
    k, v = _tokens(21, layout)
    slots = 1 * block_size + np.random.default_rng(1).permutation(8 * block_size)[:21]
    write = jax.jit(kv_write, static_argnames="implementation")
    after = logical_kv(write(pool, k, v, slots, implementation=implementation))
    for old, new, tokens in zip(before, after, (k, v)):
        want = old.copy()
        want[slots // block_size, slots % block_size] = np.asarray(tokens.astype(dtype)).astype(np.float64)
        np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_padding_lands_in_the_null_block(num_tokens):
    layout = PoolLayout(2, 8, 4, "bfloat16")
    k, v = _tokens(num_tokens, layout, "bfloat16")
    pool = jax.jit(kv_write)(layout.make_pool(5), k, v, jnp.zeros(num_tokens, jnp.int32))
    for numbers in logical_kv(pool):
        assert not numbers[1:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [2, 64])
def test_donated_pool_is_written_in_place(num_tokens, dtype):
    layout = PoolLayout(3, 64, 16, dtype)
    pool = layout.pool_struct(4096)
    token = jax.ShapeDtypeStruct((num_tokens, 3, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    compiled = jax.jit(kv_write, donate_argnums=0).lower(pool, token, token, slots).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * layout.bytes_per_block
    assert memory.temp_size_in_bytes < 0.05 * memory.alias_size_in_bytes


def test_refuses_tokens_that_do_not_fit_the_pool():
    layout = PoolLayout(3, 64, 16, "float32")
    k, v = _tokens(4, layout)
    with pytest.raises(ValueError, match=r"v must be \[T, K, D\] = \(4, 3, 64\)"):
        kv_write(layout.make_pool(2), k, v[:, :2], jnp.zeros(4, jnp.int32))
