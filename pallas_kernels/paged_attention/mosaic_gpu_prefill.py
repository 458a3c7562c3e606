"""Attention of tiles of queries of one sequence (prefill, whole or in chunks) for Hopper.

Persistent CTAs walk a list of (tile of queries, KV head, heads of its group). In each, one warp reads block ids and
issues one TMA box a block, straight from the pool; one or two warpgroups compute flash-attention for 64 rows each
and share its K and V: two heads of a group of the same 64 queries, or one head of 128 queries where the group is odd.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_ops import (
    EIGHT_ROWS,
    LOWEST,
    ROWS,
    along,
    dot,
    dot_add,
    power_of_two,
    shift_of,
    stored_and_unpacked,
    tiled,
    unpack,
    zero_after,
)
from .mosaic_gpu_plan import first_seen
from .mosaic_gpu_producer import Ring, produce

QUERIES = 64  # of a warpgroup: the M side of wgmma
SEQUENCE, TOKEN, TOKENS, POSITION = range(4)  # rows of the tile table
_ROW_CHUNKS = (64, 32, 16, 8, 4, 2, 1)  # whose sums make any number of rows: a TMA box has a static size


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """All that is static about the kernel."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    tile_kv: int
    stages: int
    consumers: int
    ctas: int
    window: int | None
    soft_cap: float | None  # in powers of two
    interpret: bool
    is_contiguous: bool  # the blocks of a sequence follow the first of its table: to measure what looking them up costs

    @property
    def heads(self) -> int:
        """Heads of a work item."""
        return self.consumers if self.group % self.consumers == 0 else 1

    @property
    def queries(self) -> int:
        """Queries of a work item."""
        return QUERIES * self.consumers // self.heads


def prefill(shape: PrefillShape, q, pool, table, tiles, count, scale, value_scale, sinks, out, *, lse_tiles, interpret):
    """Writes rows of `out`, a mutable `[T, H, D]`; returns the log-sum-exp `[lse_tiles, H, queries]` in powers of two.

    q `[T, H, D]` with at least 64 tokens, pool `[N, B, K, 2, D]`, table `[S, M]`, tiles `[4, tiles]`, count `[1]`,
    scale and value_scale `[K]`, sinks `[H]` in powers of two or None.
    """
    has_sinks = sinks is not None
    operands = (q, pool, table, tiles, count, scale, value_scale, *([sinks] if has_sinks else []), out)
    kv, dim, stages, consumers = shape.tile_kv, shape.head_dim, shape.stages, shape.consumers
    stored, unpacked = stored_and_unpacked(stages, kv, dim, pool.dtype, q.dtype)
    if unpacked and consumers > 1:
        raise ValueError("one warpgroup must unpack what it alone reads: prefill_consumers must be 1 for an 8-bit pool")
    return plgpu.kernel(
        functools.partial(_kernel, shape, has_sinks, lse_tiles is not None),
        out_type=jax.ShapeDtypeStruct((lse_tiles or 1, q.shape[1], shape.queries), jnp.float32),
        scratch_types=[
            tiled((consumers, QUERIES, dim), q.dtype),
            *stored,
            plgpu.SMEM((consumers, QUERIES, dim), q.dtype),
            plgpu.SMEM((consumers, QUERIES), jnp.float32),
            plgpu.Barrier(num_arrivals=kv // shape.block_size, num_barriers=stages),
            plgpu.Barrier(num_arrivals=kv // shape.block_size, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers),
            *unpacked,
        ],
        grid=(shape.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)


def _kernel(
    shape: PrefillShape,
    has_sinks: bool,
    has_lse: bool,
    q,  # [T, H, D] in GMEM, as are all down to `out`
    pool,  # [N, B, K, 2, D]
    table,  # [S, M]
    tiles,  # [4, tiles]
    count,  # [1]
    scale,  # [K]
    value_scale,  # [K]
    *refs,
):
    # sinks [H] where there are some; out [T, H, D]; lse [tiles, H, queries]; then what scratch_types lists
    sinks = refs[0] if has_sinks else None
    refs = refs[1:] if has_sinks else refs
    out, lse, q_tiles, keys, values, out_tiles, lse_tiles, k_full, v_full, free, cleaned, *unpacked = refs
    kv, dim, consumers = shape.tile_kv, shape.head_dim, shape.consumers
    per_kv_head = shape.group // shape.heads
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")

    def for_each_item(body, state):
        """Folds `body(tile, first_head, state)` over this CTA's items, a sequence's last tiles first: the longest."""
        per_tile = shape.num_kv_heads * per_kv_head

        def step(i, state):
            index = cta + i * shape.ctas
            return body(count[0] - 1 - lax.div(index, per_tile), lax.rem(index, per_tile) * shape.heads, state)

        return lax.fori_loop(0, jnp.maximum(pl.cdiv(count[0] * per_tile - cta, shape.ctas), 0), step, state)

    def kv_range(tile):
        """KV tiles `[begin, end)` that the item reads, and the position where its KV ends."""
        end = tiles[POSITION, tile] + tiles[TOKENS, tile]
        return 0 if shape.window is None else lax.div(seen_from(tile), kv), pl.cdiv(end, kv), end

    def seen_from(tile):
        return None if shape.window is None else first_seen(tiles[POSITION, tile], shape.window)

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")

        def work_of(tile, first_head):
            begin, last, end = kv_range(tile)
            return tiles[SEQUENCE, tile], lax.div(first_head, shape.group), begin, last, seen_from(tile), end

        produce(shape, pool, table, Ring(keys, values, k_full, v_full, free), for_each_item, work_of)

    def consume_item(tile, first_head, done):
        q_tile, out_tile = q_tiles.at[warpgroup], out_tiles.at[warpgroup]
        head = first_head + (warpgroup if shape.heads > 1 else 0)
        ahead = QUERIES * warpgroup if shape.heads == 1 else 0  # queries of the warpgroups before
        token = tiles[TOKEN, tile] + ahead
        start = jnp.minimum(token, q.shape[0] - QUERIES)  # the last tile reaches back over rows that are not its own
        skipped = token - start
        for r in range(0, QUERIES, 8):
            rows = q.at[pl.ds(start + r, 8), head]
            q_tile[pl.ds(r, 8)] = plgpu.load(rows, layout=EIGHT_ROWS, optimized=False)
        plgpu.commit_smem()

        begin, last, end = kv_range(tile)
        first_at = tiles[POSITION, tile] + ahead
        at = plgpu.broadcasted_iota(jnp.int32, (QUERIES, kv), 0, layout=plgpu.Layout.WGMMA) + (first_at - skipped)
        offset = plgpu.broadcasted_iota(jnp.int32, (QUERIES, kv), 1, layout=plgpu.Layout.WGMMA)
        factor = scale[lax.div(head, shape.group)]

        def step(index, state, *, masked: bool, ends: bool):
            done, m, l, acc = state
            stage = lax.rem(done, shape.stages)
            k, v = keys.at[stage], values.at[stage]
            if ends or unpacked:
                plgpu.barrier_wait(v_full.at[stage])  # before the scores take the registers
            if unpacked:
                unpack(v, unpacked[1], end - index * kv if ends else None)
                v = unpacked[1]
            elif ends:

                @pl.when((index + 1) * kv > end)
                def _():
                    mine = kv // consumers
                    zero_after(v.at[pl.ds(warpgroup * mine, mine)], end - index * kv, warpgroup * mine)
                    plgpu.barrier_arrive(cleaned)
                    plgpu.barrier_wait(cleaned)

            plgpu.barrier_wait(k_full.at[stage])
            if unpacked:
                unpack(k, unpacked[0])
                k = unpacked[0]
            scores = dot(q_tile, k.transpose((1, 0)), shape.interpret) * factor
            if shape.soft_cap is not None:
                scores = shape.soft_cap * jnp.tanh(scores * (1 / shape.soft_cap))
            if masked:
                position = offset + index * kv
                seen = position <= at
                if shape.window is not None:
                    seen &= position > at - shape.window
                scores = jnp.where(seen, scores, 2 * LOWEST)
            new = jnp.maximum(m, shift_of(scores.max(axis=1)))
            keep = power_of_two(m - new)
            p = jnp.exp2(scores - along(new, 0, scores.shape))  # 2 * LOWEST gives 0 whatever the shift
            l = l * keep + p.sum(axis=1)
            acc = acc * along(keep, 0, acc.shape)
            p = p.astype(q.dtype)
            if not (ends or unpacked):
                plgpu.barrier_wait(v_full.at[stage])
            acc = dot_add(acc, p, v, shape.interpret)
            plgpu.barrier_arrive(free.at[stage])
            return done + 1, new, l, acc

        state = (
            done,
            plgpu.layout_cast(jnp.full((QUERIES,), LOWEST, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA),
        )
        # Tiles that all queries see whole need no mask; those before are cut by the window, those after by causality.
        whole_to = jnp.clip(lax.div(jnp.minimum(first_at + 1, end), kv), begin, last)
        whole_from = begin
        if shape.window is not None:
            low = jnp.maximum(first_at + QUERIES - shape.window, 0)
            whole_from = jnp.clip(pl.cdiv(low, kv), begin, whole_to)
            state = lax.fori_loop(begin, whole_from, functools.partial(step, masked=True, ends=False), state)
        state = lax.fori_loop(whole_from, whole_to, functools.partial(step, masked=False, ends=False), state)
        done, m, l, acc = lax.fori_loop(whole_to, last, functools.partial(step, masked=True, ends=True), state)

        if has_sinks:
            sink = jnp.full((QUERIES,), sinks[head], jnp.float32)
            new = jnp.maximum(m, shift_of(sink))
            keep = power_of_two(m - new)
            m, l, acc = new, l * keep + jnp.exp2(sink - new), acc * along(keep, 0, acc.shape)
        acc = acc * along(value_scale[lax.div(head, shape.group)] / l, 0, acc.shape)
        plgpu.wait_smem_to_gmem(0)  # the last item's results have left
        q_tile[...] = acc.astype(q.dtype)  # the queries have done their work
        out_tile[...] = plgpu.load(q_tile, layout=EIGHT_ROWS)  # TMA takes any run of rows only of a plain tile
        if has_lse:
            lse_tiles[warpgroup] = m + jnp.log2(l)
        plgpu.commit_smem()
        if has_lse:
            plgpu.copy_smem_to_gmem(lse_tiles.at[warpgroup], lse.at[tile, head, pl.ds(ahead, QUERIES)])
        left = jnp.clip(tiles[TOKENS, tile] - ahead, 0, QUERIES)
        for rows in _ROW_CHUNKS:
            above = left & ~(2 * rows - 1)  # rows that larger chunks have written

            @pl.when((left & rows) != 0)
            def _():
                source = out_tile.at[pl.ds(skipped + above, rows)]
                plgpu.copy_smem_to_gmem(source, out.at[pl.ds(token + above, rows), head])

        return done

    @pl.when(warpgroup < consumers)
    def _consume():
        plgpu.set_max_registers(240 if consumers == 2 else 256, action="increase")
        for_each_item(consume_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
