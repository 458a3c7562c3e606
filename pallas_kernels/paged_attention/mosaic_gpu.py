"""`ragged_paged_attention` for Hopper, in Pallas Mosaic GPU: checks, work-lists, and three kernels.

Decode and verify are split over KV and combined; prefill takes tiles of queries of one sequence. All write their rows of
one output in place.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..metadata import AttentionMetadata
from ..pool import LayerPool
from .mosaic_gpu_combine import combine
from .mosaic_gpu_decode import DecodeShape, decode_partials
from .mosaic_gpu_plan import partitions, row_tiles
from .tiles_gpu import GpuTiles, default_gpu_tiles

_LOG2_E = math.log2(math.e)


def ragged_paged_attention_mosaic_gpu(
    q,
    pool: LayerPool,
    meta: AttentionMetadata,
    *,
    sm_scale,
    sliding_window,
    soft_cap,
    sinks,
    k_scale,
    v_scale,
    return_lse,
    tiles: GpuTiles | None = None,
    interpret=None,
):
    """See `ragged_paged_attention`. `interpret` is the interpreter's parameters, for tests.

    A row's result is the same to the bit alone or in any batch, verified or decoded, unless the batch holds so much KV
    that its partitions grow (`GpuTiles.partial_bytes`).
    """
    if not isinstance(tiles, GpuTiles):
        tiles = default_gpu_tiles(pool)
    _check(q, pool, tiles)
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // pool.num_kv_heads
    rows_per_token = -(-group // 8) * 8
    q = jnp.pad(q, ((0, 0), (0, max(0, rows_per_token - num_heads)), (0, 0)))  # the heads that fill a token's rows
    shape = DecodeShape(
        pool.num_kv_heads, group, rows_per_token, tiles.tokens, head_dim, pool.block_size, tiles.tile_kv, tiles.stages,
        tiles.ctas, sliding_window, None if soft_cap is None else soft_cap * _LOG2_E, interpret is not None, _look_up,
    )  # fmt: skip
    heads = _Heads(
        scale=_of_heads(k_scale, pool.num_kv_heads) * (sm_scale * _LOG2_E),
        value_scale=_of_heads(v_scale, pool.num_kv_heads),
        sinks=None if sinks is None else sinks.astype(jnp.float32) * _LOG2_E,
    )
    out = jax.new_ref(jnp.zeros(q.shape, q.dtype))
    lse = _decode(q, pool, meta, shape, tiles, heads, out, return_lse, interpret)
    out = jax.freeze(out)[:, :num_heads]
    if not return_lse:
        return out
    token = jnp.arange(num_tokens)[:, None]
    is_decoded = token < meta.query_start_loc[meta.distribution[1]]
    return out, jnp.where(is_decoded, lse, -jnp.inf) / _LOG2_E


class _Heads(NamedTuple):
    """What differs from head to head."""

    scale: jax.Array  # [K], makes q.k a score in powers of two
    value_scale: jax.Array  # [K]
    sinks: jax.Array | None  # [H], in powers of two


def _decode(q, pool, meta, shape: DecodeShape, tiles: GpuTiles, heads: _Heads, out, return_lse: bool, interpret):
    """Writes the rows of the decode and verify ranges; returns their log-sum-exp `[T, H]` in powers of two, or None."""
    num_tokens, num_heads = len(q), shape.group * shape.num_kv_heads
    row_tiles_ = row_tiles(meta, 0, meta.distribution[1], num_tokens, shape.tokens)
    max_tiles = len(row_tiles_.tokens)
    partial_bytes = 4 * shape.num_kv_heads * shape.rows * (shape.head_dim + 2)
    capacity = max(max_tiles, min(tiles.partial_bytes // partial_bytes, max_tiles * meta.block_tables.shape[1]))
    parts = partitions(row_tiles_, shape.window, tiles.partition, capacity)
    items = jnp.stack([
        row_tiles_.sequence[parts.tile], row_tiles_.token[parts.tile], row_tiles_.position[parts.tile],
        parts.begin, parts.end,
    ])  # fmt: skip
    acc, ml = decode_partials(
        shape, q, pool.arrays[0], meta.block_tables, items, parts.count[None], heads.scale,
        capacity=capacity, interpret=interpret,
    )  # fmt: skip
    kv_head = jnp.arange(shape.num_kv_heads)
    head_of_row = shape.first_head(kv_head, q.shape[1])[:, None] + jnp.arange(shape.rows) % shape.rows_per_token
    lse = combine(
        shape, acc, ml, jnp.stack([row_tiles_.token, row_tiles_.tokens, parts.first, parts.last]),
        row_tiles_.count[None], None if heads.sinks is None else heads.sinks[jnp.minimum(head_of_row, num_heads - 1)],
        heads.value_scale, out, lse_tiles=max_tiles if return_lse else None, interpret=interpret,
    )  # fmt: skip
    if not return_lse:
        return None
    token, head = jnp.arange(num_tokens)[:, None], jnp.arange(num_heads)
    tile = jnp.sum((row_tiles_.token <= token) & (jnp.arange(max_tiles) < row_tiles_.count), axis=1, keepdims=True) - 1
    kv_head = head // shape.group
    row = (token - row_tiles_.token[tile]) * shape.rows_per_token + head - shape.first_head(kv_head, q.shape[1])
    return lse[tile, kv_head, row]


def _check(q, pool: LayerPool, tiles: GpuTiles) -> None:
    dim, size = pool.head_dim, pool.block_size
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"mosaic_gpu needs q in bfloat16, got {q.dtype}")
    if pool.shard.dtype != "bfloat16":
        raise NotImplementedError(f"mosaic_gpu reads bfloat16 pools, got {pool.shard.dtype}")
    if dim % 64 or dim > 256:
        raise NotImplementedError(f"mosaic_gpu needs a head_dim of 64, 128, 192 or 256, got {dim}")
    if size % 8 or size > 256:
        raise NotImplementedError(f"mosaic_gpu needs a block_size that is a multiple of 8 up to 256, got {size}")
    assert tiles.tile_kv % math.lcm(64, size) == 0 and tiles.partition % tiles.tile_kv == 0, (tiles, size)


def _look_up(table, sequence, index):
    return table[sequence, index]


def _of_heads(scale, num_kv_heads: int):
    return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(-1), (num_kv_heads,))
