"""`copy_blocks` in plain XLA ops."""

import jax
import jax.numpy as jnp

from ..pool import LayerPool


def copy_blocks_xla(pools: tuple[LayerPool, ...], src, dst, num, blocks_per_layer) -> tuple[LayerPool, ...]:
    """See `copy_blocks`. Block by block in a loop that carries the pools: a gather and scatter of all at once would move C
    blocks whatever `num` is."""

    def copied(array):
        size = blocks_per_layer or len(array)

        def one(index, array):
            pair, layer = index // (len(array) // size), index % (len(array) // size)
            block = jax.lax.dynamic_slice_in_dim(array, layer * size + src[pair], 1)
            return jax.lax.dynamic_update_slice_in_dim(array, block, layer * size + dst[pair], 0)

        return jax.lax.fori_loop(0, num * (len(array) // size), one, array)

    src, dst = jnp.asarray(src), jnp.asarray(dst)
    return jax.tree.map(copied, pools)
