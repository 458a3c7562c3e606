"""Takes blocks out of a pool and puts them back, bit for bit: for pools that move, as to host memory."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int

from ..pool import LayerPool


def take_blocks(
    pools: tuple[LayerPool, ...], ids: Int[Array, "C"], *, blocks_per_layer: int | None = None
) -> tuple[LayerPool, ...]:
    """Blocks `ids` of every layer of every pool, as pools of these blocks alone: block `i` of layer `l` at `l * C + i`.

    blocks_per_layer: as in `copy_blocks`.
    """

    def take(pool: LayerPool) -> LayerPool:
        at = _positions(pool, ids, blocks_per_layer)
        return LayerPool(tuple(_row_major(array[at], pool) for array in pool.arrays), pool.shard)

    return tuple(map(take, pools))


def put_blocks(
    pools: tuple[LayerPool, ...],
    ids: Int[Array, "C"],
    taken: tuple[LayerPool, ...],
    *,
    blocks_per_layer: int | None = None,
) -> tuple[LayerPool, ...]:
    """The inverse: `pools` with what `take_blocks` gave written to blocks `ids`; in place where they are donated.

    The null block may stand in `ids` as often as there is nowhere else to write. Block by block: for a scatter XLA:TPU
    copies a pool of one head a shard into another layout and back.
    """

    def put(pool: LayerPool, blocks: LayerPool) -> LayerPool:
        at = _positions(pool, ids, blocks_per_layer)

        def put_one(index, arrays):
            def put_array(array, new):
                block = jax.lax.dynamic_slice_in_dim(new, index, 1)
                return jax.lax.dynamic_update_slice_in_dim(array, block, at[index], 0)

            return tuple(map(put_array, arrays, blocks.arrays))

        return LayerPool(jax.lax.fori_loop(0, len(at), put_one, pool.arrays), pool.shard)

    return tuple(map(put, pools, taken))


def _positions(pool: LayerPool, ids: jax.Array, blocks_per_layer: int | None) -> jax.Array:
    size = blocks_per_layer or pool.num_blocks
    starts = jnp.arange(0, pool.num_blocks, size, dtype=jnp.int32)
    return (starts[:, None] + ids).reshape(-1)


def _row_major(x: jax.Array, pool: LayerPool) -> jax.Array:
    """As in `read_blocks`: else XLA:TPU may copy all of the pool into a layout that the gather likes."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if pool.shard.form == "tpu" else x
