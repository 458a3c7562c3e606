"""How the Hopper kernels cut their work."""

import dataclasses
import math

from ..layout import PoolLayout

SMS = 132  # of an H100 or H200 SXM; another count costs balance, not correctness
SMEM_PER_SM = 233_472
SMEM_PER_CTA = 232_448
_RESERVED = 1024  # of each CTA, by the driver
_OVERHEAD = 6 << 10  # barriers, alignment, and what the compiler keeps for reductions across warps


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """Static tile sizes. `partition` and the two `tile_kv` decide the order of summation, the others only speed.

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
    prefill_stages: int
    prefill_consumers: int  # warpgroups of 64 rows that share a prefill CTA's K and V
    prefill_ctas: int


def default_gpu_tiles(layout: PoolLayout, group: int, window: int | None) -> GpuTiles:
    """Tiles for one shard's pool, for the H200 by arithmetic: not yet by measurement.

    Decode: about 36 KB must be in flight on each SM to cover 4.8 TB/s at 1 us. Two CTAs an SM hide each other's
    softmax, so a tile is 64 positions where only that lets two CTAs have two stages. 512 positions an item keep a lone
    sequence of 8192 with 8 KV heads on 128 of 132 SMs, and cost 3 % in float32 partials at a group of 8.
    Prefill: the largest tile whose scores fit the registers beside the accumulator; with a window the masks take some
    more (128 positions at a head_dim of 128 spilled 12 bytes).
    Raises `NotImplementedError` where not even two stages fit.
    """
    dim, size = layout.head_dim, layout.block_size
    rows = -(-group // 8) * 8
    tile_kv = math.lcm(128 if dim <= 64 else 64, size)
    wide = dim <= 64 or (dim <= 128 and window is None)
    prefill_tile_kv = math.lcm(128 if wide else 64, size)
    # What 8-bit numbers are unpacked into has one stage: a second warpgroup would have to wait for the first.
    consumers = 2 if dim <= 128 and not layout.is_quantised else 1
    unpacked = 4 * dim if layout.is_quantised else 0  # bytes for a position
    fixed = unpacked * tile_kv + rows * (6 * dim + 2 * tile_kv + 8) + _OVERHEAD
    prefill_fixed = unpacked * prefill_tile_kv + consumers * 4 * 64 * dim + _OVERHEAD
    half = SMEM_PER_SM // 2 - _RESERVED
    stages, ctas_per_sm = _stages(layout, tile_kv, half - fixed), 2
    if stages < 2:
        stages, ctas_per_sm = _stages(layout, tile_kv, SMEM_PER_CTA - fixed), 1
    prefill_stages = _stages(layout, prefill_tile_kv, SMEM_PER_CTA - prefill_fixed)
    if min(stages, prefill_stages) < 2:
        raise NotImplementedError(
            f"mosaic_gpu needs two stages of K and V in shared memory: block_size = {size} is too much at"
            f" head_dim = {dim} in {layout.dtype}"
        )
    return GpuTiles(
        partition=math.lcm(512, tile_kv), tile_kv=tile_kv, stages=min(stages, 4), tokens=1, ctas=ctas_per_sm * SMS,
        partial_bytes=64 << 20, prefill_tile_kv=prefill_tile_kv, prefill_stages=min(prefill_stages, 4),
        prefill_consumers=consumers, prefill_ctas=SMS,
    )  # fmt: skip


def _stages(layout: PoolLayout, tile_kv: int, available: int) -> int:
    return available // (2 * tile_kv * layout.head_dim * layout.storage_dtype.itemsize)
