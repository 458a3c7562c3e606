"""Split-K attention of a few queries a sequence (decode, verify) for Hopper.

Queries stand on wgmma's N side, in steps of 8: `scores[kv, row] = K q^T`, then `acc[d, row] += V^T weights`. On the M
side they would be padded to 64, eight times the tensor work and softmax for a group of up to 8 heads.

Persistent CTAs walk a list of (queries, KV head, run of KV). In each, one warp reads block ids and issues one TMA box a
block, straight from the pool; a warpgroup computes. Both count tiles across items: that count modulo the stages
is the stage. A partial result is flash-attention's (m, l, acc) in float32, except that m is an integer and weights are
powers of two (see `xla.py`).
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_ops import (
    COLUMNS,
    EIGHT_ROWS,
    LOWEST,
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
from .mosaic_gpu_producer import Ring, produce

PRODUCER, CONSUMER = 0, 1  # warpgroups
SEQUENCE, TOKEN, POSITION, BEGIN, END = range(5)  # rows of the item table


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """All that is static about the kernel."""

    num_kv_heads: int
    group: int  # heads of one KV head
    rows_per_token: int  # the group rounded up to 8: neighbouring heads fill it
    tokens: int
    head_dim: int
    block_size: int
    tile_kv: int
    stages: int
    ctas: int
    window: int | None
    soft_cap: float | None  # in powers of two
    interpret: bool
    is_contiguous: bool  # the blocks of a sequence follow the first of its table: to measure what looking them up costs

    @property
    def rows(self) -> int:
        return self.tokens * self.rows_per_token

    def first_head(self, kv_head, num_heads: int):
        """The head of a token's first row."""
        return jnp.minimum(kv_head * self.group, num_heads - self.rows_per_token)


def decode_partials(shape: DecodeShape, q, pool, table, items, count, scale, *, capacity: int, interpret):
    """Partials of `count` items: acc `[capacity, K, D, rows]`, and m and l `[capacity, K, 2, rows]`.

    q `[T, H, D]`, pool `[N, B, K, 2, D]`, table `[S, M]`, items `[5, capacity]`, count `[1]`, scale `[K]` (what turns
    q.k into a score in powers of two).
    """
    rows, dim, kv = shape.rows, shape.head_dim, shape.tile_kv
    per_tile = kv // shape.block_size
    stored, unpacked = stored_and_unpacked(shape.stages, kv, dim, pool.dtype, q.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, shape),
        out_type=[
            jax.ShapeDtypeStruct((capacity, shape.num_kv_heads, dim, rows), jnp.float32),
            jax.ShapeDtypeStruct((capacity, shape.num_kv_heads, 2, rows), jnp.float32),
        ],
        scratch_types=[
            tiled((rows, dim), q.dtype),
            *stored,
            tiled((rows, kv), q.dtype),
            plgpu.SMEM((dim, rows), jnp.float32),
            plgpu.SMEM((2, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=per_tile, num_barriers=shape.stages),
            plgpu.Barrier(num_arrivals=per_tile, num_barriers=shape.stages),
            plgpu.Barrier(num_barriers=shape.stages),
            *unpacked,
        ],
        grid=(shape.ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, pool, table, items, count, scale)


def _kernel(
    shape: DecodeShape,
    q,  # [T, H, D] in GMEM, as are all down to `ml_out`
    pool,  # [N, B, K, 2, D]
    table,  # [S, M]
    items,  # [5, W]
    count,  # [1]
    scale,  # [K]
    acc_out,  # [W, K, D, rows]
    ml_out,  # [W, K, 2, rows]
    q_tile,  # [rows, D]
    keys,  # [stages, tile_kv, D]
    values,  # [stages, tile_kv, D]
    weights,  # [rows, tile_kv]
    acc_tile,  # [D, rows]
    ml_tile,  # [2, rows]
    k_full,  # [stages]
    v_full,  # [stages]
    free,  # [stages]
    *unpacked,  # keys and values [tile_kv, D] of an 8-bit pool
):
    kv, dim, rows = shape.tile_kv, shape.head_dim, shape.rows
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")

    def for_each_item(body, state):
        """Folds `body(item, kv_head, state)` over this CTA's items; its heads are taken at about the same time."""

        def step(i, state):
            index = cta + i * shape.ctas
            return body(lax.div(index, shape.num_kv_heads), lax.rem(index, shape.num_kv_heads), state)

        mine = pl.cdiv(count[0] * shape.num_kv_heads - cta, shape.ctas)
        return lax.fori_loop(0, jnp.maximum(mine, 0), step, state)

    def tiles_of(item):
        return lax.div(items[BEGIN, item], kv), pl.cdiv(items[END, item], kv)

    @pl.when(warpgroup == PRODUCER)
    def _produce():
        def work_of(item, kv_head):
            seen_from = None if shape.window is None else items[BEGIN, item]
            return items[SEQUENCE, item], kv_head, *tiles_of(item), seen_from, items[END, item]

        produce(shape, pool, table, Ring(keys, values, k_full, v_full, free), for_each_item, work_of)

    @pl.when(warpgroup == CONSUMER)
    def _consume():
        row = plgpu.broadcasted_iota(jnp.int32, (kv, rows), 1, layout=plgpu.Layout.WGMMA)
        offset = plgpu.broadcasted_iota(jnp.int32, (kv, rows), 0, layout=plgpu.Layout.WGMMA)
        token_of_row = lax.div(row, shape.rows_per_token)

        def consume_item(item, kv_head, done):
            head = shape.first_head(kv_head, q.shape[1])
            for t in range(shape.tokens):
                source = q.at[jnp.minimum(items[TOKEN, item] + t, q.shape[0] - 1), pl.ds(head, shape.rows_per_token)]
                here = pl.ds(t * shape.rows_per_token, shape.rows_per_token)
                q_tile[here] = plgpu.load(source, layout=EIGHT_ROWS, optimized=False)
            plgpu.commit_smem()
            at = items[POSITION, item] + token_of_row
            end = items[END, item]
            factor = scale[kv_head]

            def tile(index, state):
                done, m, l, acc = state
                stage = lax.rem(done, shape.stages)
                plgpu.barrier_wait(k_full.at[stage])
                k, v = keys.at[stage], values.at[stage]
                if unpacked:
                    unpack(k, unpacked[0])
                    k = unpacked[0]
                scores = dot(k, q_tile.transpose((1, 0)), shape.interpret) * factor
                if shape.soft_cap is not None:
                    scores = shape.soft_cap * jnp.tanh(scores * (1 / shape.soft_cap))
                position = offset + index * kv
                seen = position <= at
                if shape.window is not None:
                    seen &= position > at - shape.window
                scores = jnp.where(seen, scores, 2 * LOWEST)
                new = jnp.maximum(m, shift_of(scores.max(axis=0)))
                keep = power_of_two(m - new)
                p = jnp.exp2(scores - along(new, 1, scores.shape))  # 2 * LOWEST gives 0 whatever the shift
                l = l * along(keep, 1, l.shape) + p  # summed over KV only once, at the end
                acc = acc * along(keep, 1, acc.shape)
                weights.transpose((1, 0))[...] = p.astype(weights.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(v_full.at[stage])

                if unpacked:
                    unpack(v, unpacked[1], end - index * kv)
                    v = unpacked[1]
                else:
                    pl.when((index + 1) * kv > end)(lambda: zero_after(v, end - index * kv))
                acc = dot_add(acc, v.transpose((1, 0)), weights.transpose((1, 0)), shape.interpret)
                plgpu.barrier_arrive(free.at[stage])
                return done + 1, new, l, acc

            state = (
                done,
                plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), COLUMNS),
                plgpu.layout_cast(jnp.zeros((kv, rows), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.zeros((dim, rows), jnp.float32), plgpu.Layout.WGMMA),
            )
            done, m, l, acc = lax.fori_loop(*tiles_of(item), tile, state)
            plgpu.wait_smem_to_gmem(0)  # the last item's result has left
            acc_tile[...] = acc
            ml_tile[0] = m
            ml_tile[1] = l.sum(axis=0)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(acc_tile, acc_out.at[item, kv_head])
            plgpu.copy_smem_to_gmem(ml_tile, ml_out.at[item, kv_head])
            return done

        for_each_item(consume_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
