"""The warp that brings K and V into a Hopper kernel's ring of shared memory, a TMA box a block, straight from the pool."""

from collections.abc import Callable
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_ops import drain


class Ring(NamedTuple):
    """Stages of a tile of K and one of V each, and their barriers."""

    keys: object  # [stages, tile_kv, D]
    values: object  # [stages, tile_kv, D]
    k_full: object  # [stages]
    v_full: object  # [stages]
    free: object  # [stages], of both


def produce(shape, pool, table, ring: Ring, for_each_item: Callable, work_of: Callable) -> None:
    """Fills the ring with the KV tiles of every work item, in order; the number of tiles so far tells the stage.

    `shape` is the kernel's (stages, tile_kv, block_size, is_contiguous), pool `[N, B, K, 2, D]`, table `[S, M]`.
    `work_of(*item)` -> (sequence, KV head, first tile, one past the last, position from which its KV is seen, None for the
    first tile's own, position where it ends).
    """
    per_tile = shape.tile_kv // shape.block_size

    def block_id(sequence, index):
        return table[sequence, 0] + index if shape.is_contiguous else table[sequence, index]

    def in_one_warp(warp):
        @pl.when(warp == 0)
        def _():
            drain(ring.free, shape.stages, for_each_item(produce_item, jnp.int32(0)))

    def produce_item(item, part, done):
        sequence, kv_head, begin, last, seen_from, end = work_of(item, part)
        least = None if seen_from is None else lax.div(seen_from, shape.block_size)

        def block_of(index):
            """In the place of a block that the window has passed, which is another's by now, one that is seen."""
            return block_id(sequence, index if least is None else jnp.maximum(index, least))

        def tile(index, done):
            stage = lax.rem(done, shape.stages)

            @pl.when(done >= shape.stages)
            def _():
                plgpu.barrier_wait(ring.free.at[stage])

            first = index * per_tile
            # Past the end the null block is fetched: it is in L2, and every tile then brings the same bytes.
            ids = [jnp.where((first + b) * shape.block_size < end, block_of(first + b), 0) for b in range(per_tile)]
            for half, (buffer, full) in enumerate(((ring.keys, ring.k_full), (ring.values, ring.v_full))):
                for b, block in enumerate(ids):
                    here = pl.ds(b * shape.block_size, shape.block_size)
                    plgpu.copy_gmem_to_smem(pool.at[block, :, kv_head, half], buffer.at[stage, here], full.at[stage])
            return done + 1

        return lax.fori_loop(begin, last, tile, done)

    plgpu.warp_map(in_one_warp)
