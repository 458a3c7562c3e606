"""The specification of `kv_write`, in numpy."""

import numpy as np

from ..layout import LayerPool
from ..metadata import AnyArray


def kv_write_reference(pool: LayerPool, k: AnyArray, v: AnyArray, slot_mapping: AnyArray) -> LayerPool:
    """A new pool (numpy leaves, storage dtype) with token `t`'s K and V, `[T, K, D]`, in slot `slot_mapping[t]`.

    Where two tokens name one slot (padding, in the null block) either may win.
    """
    keys, values = np.array(pool.keys), np.array(pool.values)
    k, v = (np.asarray(x).astype(pool.dtype).view(values.dtype) for x in (k, v))
    for token, slot in enumerate(np.asarray(slot_mapping)):
        block, offset = divmod(int(slot), pool.block_size)
        keys[block, :, :, offset] = k[token]
        values[block, :, offset, :] = v[token]
    return LayerPool(keys=keys, values=values)
