"""`kv_write` in plain XLA ops."""

import jax

from ..pool import LayerPool, pack_tokens, quantise


def kv_write_xla(pool: LayerPool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, k_scale, v_scale) -> LayerPool:
    """See `kv_write`."""
    block, offset = slot_mapping // pool.block_size, slot_mapping % pool.block_size
    k, v = quantise(k, k_scale, pool.shard), quantise(v, v_scale, pool.shard)
    if pool.shard.form == "cpu":
        keys, values = pool.arrays
        keys = keys.at[block, :, :, offset].set(k, mode="promise_in_bounds")
        arrays = keys, values.at[block, :, offset, :].set(v, mode="promise_in_bounds")
    else:
        packed = pack_tokens(k, v, pool.shard)
        arrays = (pool.arrays[0].at[block, offset].set(packed, mode="promise_in_bounds"),)
    return LayerPool(arrays, pool.shard)
