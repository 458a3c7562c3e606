"""`kv_write` in plain XLA ops."""

import jax

from ..layout import LayerPool, to_storage


def kv_write_xla(pool: LayerPool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> LayerPool:
    block, offset = slot_mapping // pool.block_size, slot_mapping % pool.block_size
    return LayerPool(
        keys=pool.keys.at[block, :, :, offset].set(to_storage(k, pool), mode="promise_in_bounds"),
        values=pool.values.at[block, :, offset, :].set(to_storage(v, pool), mode="promise_in_bounds"),
    )
