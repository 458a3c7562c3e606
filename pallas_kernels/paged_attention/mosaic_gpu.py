"""`ragged_paged_attention` for Hopper, in Pallas Mosaic GPU: checks, work-lists, and three kernels.

Decode and verify are split over KV and combined; prefill takes tiles of queries of one sequence. All write their rows
of one output in place.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..metadata import AttentionMetadata
from ..pool import LayerPool
from .mosaic_gpu_combine import combine
from .mosaic_gpu_decode import DecodeShape, decode_partials
from .mosaic_gpu_plan import RowTiles, partitions, row_tiles
from .mosaic_gpu_prefill import QUERIES, PrefillShape, prefill
from .tile_table import tuned
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
    contiguous: bool = False,
    interpret=None,
):
    """See `ragged_paged_attention`. `interpret` is the interpreter's parameters, for tests.

    Where `contiguous`, the blocks of each sequence follow the first of its table, and are not looked up.

    A row's result is the same to the bit alone or in any batch, verified or decoded, unless the batch holds so much KV
    that its partitions grow (`GpuTiles.partial_bytes`).
    """
    _check_chip()
    _check(q, pool)
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // pool.num_kv_heads
    if not isinstance(tiles, GpuTiles):
        tiles = tuned(default_gpu_tiles(pool.shard, group, sliding_window), "mosaic_gpu", pool.shard, group)
    _check_tiles(tiles, pool.block_size)
    per_tile = max(tiles.tile_kv, tiles.prefill_tile_kv) // pool.block_size
    spare = -meta.block_tables.shape[1] % per_tile  # producers look a whole tile's blocks up
    meta = dataclasses.replace(meta, block_tables=jnp.pad(meta.block_tables, ((0, 0), (0, spare))))
    rows_per_token = -(-group // 8) * 8
    # The kernels read whole tiles: of 64 queries, and of the heads that fill a token's rows.
    q = jnp.pad(q, ((0, max(0, QUERIES - num_tokens)), (0, max(0, rows_per_token - num_heads)), (0, 0)))
    shape_tail = sliding_window, None if soft_cap is None else soft_cap * _LOG2_E, interpret is not None, contiguous
    shape = DecodeShape(
        pool.num_kv_heads, group, rows_per_token, tiles.tokens, head_dim, pool.block_size, tiles.tile_kv, tiles.stages,
        tiles.ctas, *shape_tail,
    )  # fmt: skip
    heads = _Heads(
        scale=_of_heads(k_scale, pool.num_kv_heads) * (sm_scale * _LOG2_E),
        value_scale=_of_heads(v_scale, pool.num_kv_heads),
        sinks=None if sinks is None else sinks.astype(jnp.float32) * _LOG2_E,
    )
    prefill_shape = PrefillShape(
        pool.num_kv_heads, group, head_dim, pool.block_size, tiles.prefill_tile_kv, tiles.prefill_stages,
        tiles.prefill_consumers, tiles.prefill_ctas, *shape_tail,
    )  # fmt: skip
    out = jax.new_ref(jnp.zeros(q.shape, q.dtype))
    decoded = _decode(q, pool, meta, shape, tiles, heads, out, return_lse, interpret)
    prefilled = _prefill(q, pool, meta, prefill_shape, heads, out, return_lse, interpret)
    out = jax.freeze(out)[:num_tokens, :num_heads]
    if not return_lse:
        return out
    token = jnp.arange(num_tokens)[:, None]
    _, decode_end, end = meta.query_start_loc[meta.distribution]
    lse = jnp.where(token < decode_end, decoded[:num_tokens], prefilled[:num_tokens, :num_heads])
    return out, jnp.where(token < end, lse, -jnp.inf) / _LOG2_E


class _Heads(NamedTuple):
    """What differs from head to head."""

    scale: jax.Array  # [K], makes q.k a score in powers of two
    value_scale: jax.Array  # [K]
    sinks: jax.Array | None  # [H], in powers of two


def _decode(q, pool, meta, shape: DecodeShape, tiles: GpuTiles, heads: _Heads, out, return_lse: bool, interpret):
    """Writes the rows of the decode and verify ranges; returns their log-sum-exp `[T, H]` in powers of two, or None."""
    num_tokens, num_heads = len(q), shape.group * shape.num_kv_heads
    queries = row_tiles(meta, 0, meta.distribution[1], num_tokens, shape.tokens)
    max_tiles = len(queries.tokens)
    partial_bytes = 4 * shape.num_kv_heads * shape.rows * (shape.head_dim + 2)
    capacity = max(max_tiles, min(tiles.partial_bytes // partial_bytes, max_tiles * meta.block_tables.shape[1]))
    parts = partitions(queries, shape.window, tiles.partition, capacity)
    items = jnp.stack([
        queries.sequence[parts.tile], queries.token[parts.tile], queries.position[parts.tile],
        parts.begin, parts.end,
    ])  # fmt: skip
    acc, ml = decode_partials(
        shape, q, pool.arrays[0], meta.block_tables, items, parts.count[None], heads.scale,
        capacity=capacity, interpret=interpret,
    )  # fmt: skip
    kv_head = jnp.arange(shape.num_kv_heads)
    head_of_row = shape.first_head(kv_head, q.shape[1])[:, None] + jnp.arange(shape.rows) % shape.rows_per_token
    lse = combine(
        shape, acc, ml, jnp.stack([queries.token, queries.tokens, parts.first, parts.last]),
        queries.count[None], None if heads.sinks is None else heads.sinks[jnp.minimum(head_of_row, num_heads - 1)],
        heads.value_scale, out, lse_tiles=max_tiles if return_lse else None, interpret=interpret,
    )  # fmt: skip
    if not return_lse:
        return None
    token, head = jnp.arange(num_tokens), jnp.arange(num_heads)
    tile = _tile_of(queries, token)
    kv_head = head // shape.group
    row = (token - queries.token[tile])[:, None] * shape.rows_per_token + head - shape.first_head(kv_head, q.shape[1])
    return lse[tile[:, None], kv_head, row]


def _prefill(q, pool, meta, shape: PrefillShape, heads: _Heads, out, return_lse: bool, interpret):
    """Writes the rows of the prefill range; returns their log-sum-exp `[T, H]` in powers of two, or None."""
    tiles = row_tiles(meta, meta.distribution[1], meta.distribution[2], len(q), shape.queries)
    lse = prefill(
        shape, q, pool.arrays[0], meta.block_tables,
        jnp.stack([tiles.sequence, tiles.token, tiles.tokens, tiles.position]), tiles.count[None],
        heads.scale, heads.value_scale, heads.sinks, out,
        lse_tiles=len(tiles.tokens) if return_lse else None, interpret=interpret,
    )  # fmt: skip
    if not return_lse:
        return None
    token = jnp.arange(len(q))
    tile = _tile_of(tiles, token)
    warpgroup = (token - tiles.token[tile]) // QUERIES
    first = tiles.token[tile] + QUERIES * warpgroup
    row = token - jnp.minimum(first, len(q) - QUERIES) + QUERIES * warpgroup
    return lse[tile, :, row]


def _tile_of(tiles: RowTiles, token: jax.Array) -> jax.Array:
    """The tile of each token that is in one."""
    present = jnp.arange(len(tiles.tokens)) < tiles.count
    return jnp.sum((tiles.token <= token[:, None]) & present, axis=1) - 1


def _check(q, pool: LayerPool) -> None:
    dim, size = pool.head_dim, pool.block_size
    if pool.shard.form != "gpu":
        raise NotImplementedError(f"mosaic_gpu reads the gpu form of the pool, got {pool.shard.form}")
    if q.dtype != jnp.bfloat16 or pool.shard.dtype == "float32":
        dtypes = f"{q.dtype} and {pool.shard.dtype}"
        raise NotImplementedError(f"mosaic_gpu needs q in bfloat16 and a pool of at most 16 bits, got {dtypes}")
    if dim not in (64, 128, 192, 256):
        raise NotImplementedError(f"mosaic_gpu needs a head_dim of 64, 128, 192 or 256, got {dim}")
    if size % 8:
        raise NotImplementedError(f"mosaic_gpu needs a block_size that is a multiple of 8, got {size}")


def _check_chip() -> None:
    """wgmma is Hopper's alone. With no GPU here, a program for one is taken to be for the chip that can run it."""
    if jax.default_backend() == "gpu" and (capability := jax.local_devices()[0].compute_capability) != "9.0":
        raise NotImplementedError(f"mosaic_gpu needs compute capability 9.0 (Hopper), this GPU has {capability}")


def _check_tiles(tiles: GpuTiles, block_size: int) -> None:
    for name in ("tile_kv", "prefill_tile_kv"):
        if getattr(tiles, name) % math.lcm(64, block_size):
            raise ValueError(f"{name} must be a multiple of 64 and of block_size = {block_size}, got {tiles}")
    if tiles.partition % tiles.tile_kv:
        raise ValueError(f"partition must be a multiple of tile_kv, got {tiles}")


def _of_heads(scale, num_kv_heads: int):
    return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(-1), (num_kv_heads,))
