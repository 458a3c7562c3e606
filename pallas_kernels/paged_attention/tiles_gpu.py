"""How the Hopper kernels cut their work."""

import dataclasses
import math

from ..pool import LayerPool

SMS = 132  # of an H100 or H200 SXM; another count costs balance, not correctness
SMEM_PER_SM = 233_472
SMEM_PER_CTA = 232_448
_STAGED = 24_000  # bytes of a decode CTA that are not K and V stages, at most


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """Static tile sizes. `partition` and `tile_kv` decide the order of summation, the others only speed.

    KV is reduced in tiles of `tile_kv` positions that start at its multiples, counted from position 0 of the sequence;
    decode and verify fold the tiles of each run of `partition` positions, and then the runs.
    """

    partition: int  # KV positions of a decode work item; a multiple of tile_kv
    tile_kv: int  # KV positions of a compute tile; a multiple of 64 and of the block size
    stages: int  # K and V tiles in flight in a decode CTA
    tokens: int  # queries of one sequence that a decode CTA takes together: more than one only helps verify
    ctas: int  # persistent decode CTAs
    partial_bytes: int  # memory for the partial results of split sequences; where it is too small, partitions double
    prefill_tile_kv: int
    prefill_consumers: int  # warpgroups of 64 rows that share a prefill CTA's K and V
    prefill_stages: int
    prefill_ctas: int


def default_gpu_tiles(pool: LayerPool) -> GpuTiles:
    """For the H200 by arithmetic, not yet by measurement.

    About 36 KB must be in flight on each SM to cover 4.8 TB/s at 1 us: as many stages as fit two CTAs an SM give more
    than that twice over, and two CTAs hide each other's softmax. 512 positions an item keep a lone sequence of 8192 with
    8 KV heads on 128 of 132 SMs, and cost 3 % in float32 partials at a group of 8. Prefill wants the largest tile whose
    scores still fit the registers beside the accumulator.
    """
    dim, size = pool.head_dim, pool.block_size
    tile_kv = math.lcm(64 if dim > 128 else 128, size)
    stored = 2 * tile_kv * dim * pool.shard.storage_dtype.itemsize
    unpacked = 2 * tile_kv * dim * 2 if pool.shard.is_quantised else 0
    stages = max(2, (SMEM_PER_SM // 2 - _STAGED - unpacked) // stored)
    consumers = 2 if dim <= 128 else 1
    return GpuTiles(
        partition=math.lcm(512, tile_kv), tile_kv=tile_kv, stages=min(stages, 4), tokens=1, ctas=2 * SMS,
        partial_bytes=64 << 20, prefill_consumers=consumers, prefill_stages=2, prefill_ctas=SMS,
    )  # fmt: skip
