"""`ragged_paged_attention` for TPU: how the op's arguments become the kernel's, and its result the op's.

Queries go in as `[T, H / pq, pq, lanes]`, the pool's form, padded with zeros to the pool's lanes; results come out
alike. By KV head, as they are multiplied, they would have to be transposed here, which XLA does at several cycles a register;
the kernel's strided loads do it for less. The kernel is in `mosaic_tpu_kernel`.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..layout import HALF_LANES, LANES
from ..metadata import AttentionMetadata
from ..pool import LayerPool
from .mosaic_tpu_kernel import TABLE_ROWS, Loop, Refs, attention_kernel
from .mosaic_tpu_softmax import LOG2_E, Scoring
from .tile_table import tuned
from .tiles import TpuTiles, default_tpu_tiles

_SMALLEST_VMEM = 16 * 2**20  # of the chips that are served, a v4's


def ragged_paged_attention_mosaic_tpu(
    q,
    pool: LayerPool,
    meta: AttentionMetadata,
    *,
    sm_scale,
    sliding_window=None,
    soft_cap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
    tiles=None,
    contiguous: bool = False,
    interpret=False,
):
    """See `ragged_paged_attention`. `interpret` is pallas_call's.

    Where `contiguous`, the blocks of each sequence follow the first of its table, and are not looked up.
    """
    layout = pool.shard
    if layout.form != "tpu":
        raise NotImplementedError(f"the pool's form must be tpu, got {layout.form}")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"q must be float32 or bfloat16, got {q.dtype}")
    group = q.shape[1] // layout.num_kv_heads
    if not isinstance(tiles, TpuTiles):
        tiles = tuned(default_tpu_tiles(layout, group, q.dtype.itemsize, _vmem_bytes()), "mosaic_tpu", layout, group)
    if tiles.fetch % layout.block_size:
        raise ValueError(f"tiles.fetch must be a multiple of block_size = {layout.block_size}, got {tiles.fetch}")
    is_full = "float32" in (q.dtype.name, layout.dtype)
    scoring = Scoring(
        layout,
        group,
        sm_scale,
        sliding_window,
        soft_cap,
        jnp.dtype(jnp.float32 if is_full else jnp.bfloat16),
        interpret,
    )
    scales = [
        jnp.broadcast_to(
            jnp.float32(1) if scale is None else scale.astype(jnp.float32).reshape(-1), layout.num_kv_heads
        )
        for scale in (k_scale, v_scale)
    ]
    if sinks is not None:
        sinks = jnp.broadcast_to((sinks.astype(jnp.float32) * LOG2_E)[:, None], (len(sinks), LANES))
    out, lse = _call(
        _packed(q, layout.lanes), pool.arrays[0], meta, jnp.stack(scales), sinks, scoring, tiles, return_lse, contiguous
    )
    is_real = jnp.arange(len(q)) < meta.query_start_loc[meta.distribution[2]]
    values = slice(HALF_LANES, HALF_LANES + q.shape[2]) if layout.packs_kv else slice(0, q.shape[2])
    out = jnp.where(is_real[:, None, None], out.reshape(len(q), -1, layout.lanes)[:, : q.shape[1], values], 0)
    return (out, jnp.where(is_real[:, None], lse[:, :, 0, 0], -jnp.inf)) if return_lse else out


def _vmem_bytes() -> int:
    """Of a core of the chip that is compiled for, or the least there is where that cannot be told."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:
        return _SMALLEST_VMEM


def _packed(q, lanes: int):
    """`[T, H, D]` as `[T, H / pq, pq, lanes]`, H rounded up."""
    packing = 4 // q.dtype.itemsize
    q = jnp.pad(q, ((0, 0), (0, -q.shape[1] % packing), (0, lanes - q.shape[2])))
    return q.reshape(len(q), -1, packing, lanes)


def _call(q, pool, meta, scales, sinks, scoring: Scoring, tiles: TpuTiles, return_lse: bool, contiguous: bool):
    loops = (
        Loop(scoring, 1, 1, tiles.decode_kv, is_stacked=True, is_contiguous=contiguous),
        Loop(scoring, tiles.verify_q, tiles.verify_q, tiles.decode_kv, is_stacked=True, is_contiguous=contiguous),
        Loop(scoring, tiles.prefill_q, tiles.strip, tiles.prefill_kv, is_stacked=False, is_contiguous=contiguous),
    )
    tables = meta.block_tables[:, None]  # a row is a tile of its own, so that it can be copied alone
    hbm, vmem, smem = (
        pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.MemorySpace.VMEM, pltpu.MemorySpace.SMEM)
    )
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if return_lse:
        outputs.append(jax.ShapeDtypeStruct((len(q), loops[0].num_heads, 1, LANES), jnp.float32))
    inputs = dict(
        seq_lens=(meta.seq_lens, None), starts=(meta.query_start_loc, None), distribution=(meta.distribution, None),
        scales=(scales, smem), tables=(tables, hbm), q=(q, hbm), pool=(pool, hbm), sinks=(sinks, vmem),
    )  # fmt: skip
    inputs = {name: given for name, given in inputs.items() if given[0] is not None}
    scratch = dict(
        table=pltpu.SMEM((TABLE_ROWS, *tables.shape[1:]), jnp.int32),
        kv=pltpu.VMEM((tiles.buffers, tiles.fetch, *pool.shape[2:]), pool.dtype),
        producer=pltpu.SMEM((4,), jnp.int32),
        in_flight=pltpu.SMEM((2,), jnp.int32),
        table_sem=pltpu.SemaphoreType.DMA((TABLE_ROWS,)),
        kv_sem=pltpu.SemaphoreType.DMA((tiles.buffers,)),
        q_sem=pltpu.SemaphoreType.DMA((2,)),
        out_sem=pltpu.SemaphoreType.DMA((2,)),
    )
    names = [*inputs, *("out", "lse")[: len(outputs)], *scratch]

    def kernel(*refs):
        given = dict.fromkeys(Refs._fields) | dict(zip(names, refs, strict=True))
        attention_kernel(Refs(**given), loops)

    results = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=sum(spec is None for _, spec in inputs.values()),
            grid=(1,),
            in_specs=[spec for _, spec in inputs.values() if spec is not None],
            out_specs=[hbm] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=tiles.vmem_bytes),
        interpret=scoring.interpret,
        name="ragged_paged_attention",
    )(*(array for array, _ in inputs.values()))
    return results[0], results[1] if return_lse else None
