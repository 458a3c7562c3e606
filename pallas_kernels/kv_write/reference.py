"""The specification of `kv_write`, in numpy."""

import jax.numpy as jnp
import numpy as np

from ..layout import PoolLayout
from ..metadata import AnyArray
from ..pool import LayerPool, logical_kv, pool_from_logical


def _rounded(x: AnyArray, scale: AnyArray | None, layout: PoolLayout) -> np.ndarray:
    x = np.asarray(x).astype(np.float32)
    if scale is not None:
        x = x / np.asarray(scale, np.float32).reshape(-1, 1)
    if layout.is_quantised:
        limit = 127 if layout.dtype == "int8" else 448
        x = np.clip(np.round(x) if layout.dtype == "int8" else x, -limit, limit)
    return x.astype(jnp.dtype(layout.dtype)).astype(np.float64)


def kv_write_reference(
    pool: LayerPool, k: AnyArray, v: AnyArray, slot_mapping: AnyArray, k_scale=None, v_scale=None
) -> LayerPool:
    """A new pool of one shard with token `t`'s K and V, `[T, K, D]`, over their scales, in slot `slot_mapping[t]`.

    Where two tokens name one slot (padding, in the null block) either may win.
    """
    keys, values = logical_kv(pool)
    k, v = _rounded(k, k_scale, pool.shard), _rounded(v, v_scale, pool.shard)
    for token, slot in enumerate(np.asarray(slot_mapping)):
        block, offset = divmod(int(slot), pool.block_size)
        keys[block, offset] = k[token]
        values[block, offset] = v[token]
    return pool_from_logical(keys, values, pool.shard)
