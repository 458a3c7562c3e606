"""`kv_write` puts tokens where they belong, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PoolLayout, kv_write, make_pool, pool_struct
from pallas_kernels.pool import logical_kv, pool_from_logical


def _tokens(num_tokens, layout, dtype="float32"):
    k, v = np.random.default_rng(0).standard_normal((2, num_tokens, layout.num_kv_heads, layout.head_dim))
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["cpu", "gpu", "tpu"])
def test_writes_each_token_to_its_slot_and_nothing_else(form, dtype, block_size, implementation):
    layout = PoolLayout(3, 64, block_size, dtype, form)
    pool = pool_from_logical(*np.ones((2, 9, block_size, 3, 64)), layout)
    before = logical_kv(pool)
    k, v = _tokens(21, layout)
    slots = 1 * block_size + np.random.default_rng(1).permutation(8 * block_size)[:21]
    write = jax.jit(kv_write, static_argnames="implementation")
    after = logical_kv(write(pool, k, v, slots, implementation=implementation))
    for old, new, tokens in zip(before, after, (k, v)):
        want = old.copy()
        want[slots // block_size, slots % block_size] = np.asarray(tokens.astype(dtype)).astype(np.float64)
        np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize("form", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_numbers_are_over_their_scales_and_saturated(dtype, form):
    layout = PoolLayout(3, 64, 16, dtype, form)
    k, v = _tokens(21, layout)
    k = k.at[0, 0, 0].set(1e6).at[1, 1, 1].set(-1e6)
    scales = dict(k_scale=jnp.asarray([0.02, 0.03, 0.04]), v_scale=jnp.asarray(0.05))
    pools = [
        jax.jit(kv_write, static_argnames="implementation")(
            make_pool(layout, 4), k, v, jnp.arange(16, 37), implementation=implementation, **scales
        )
        for implementation in ("xla", "reference")
    ]
    got, want = (logical_kv(pool) for pool in pools)
    for numbers, expected, tokens, scale in zip(got, want, (k, v), scales.values()):
        np.testing.assert_array_equal(numbers, expected)
        limit = 127 if dtype == "int8" else 448
        meant = np.clip(np.asarray(tokens) / np.asarray(scale).reshape(-1, 1), -limit, limit)
        written = numbers.reshape(-1, 3, 64)[16:37]
        np.testing.assert_allclose(written, meant, rtol=0.07, atol=0.51 if dtype == "int8" else 1e-2)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_padding_lands_in_the_null_block(num_tokens):
    layout = PoolLayout(2, 8, 4, "bfloat16")
    k, v = _tokens(num_tokens, layout, "bfloat16")
    pool = jax.jit(kv_write)(make_pool(layout, 5), k, v, jnp.zeros(num_tokens, jnp.int32))
    for numbers in logical_kv(pool):
        assert not numbers[1:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [2, 64])
def test_donated_pool_is_written_in_place(num_tokens, dtype):
    layout = PoolLayout(3, 64, 16, dtype)
    pool = pool_struct(layout, 4096)
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
        kv_write(make_pool(layout, 2), k, v[:, :2], jnp.zeros(4, jnp.int32))
