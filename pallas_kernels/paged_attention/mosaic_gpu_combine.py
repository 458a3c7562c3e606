"""Folds the partial results of decode's items, in order of position, and writes a token's heads where they belong."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_decode import DecodeShape
from .mosaic_gpu_ops import COLUMNS, EIGHT_ROWS, LOWEST, along, power_of_two, shift_of, tiled

TOKEN, TOKENS, FIRST, LAST = range(4)  # rows of the tile table


def combine(shape: DecodeShape, acc, ml, tiles, count, sinks, value_scale, out, *, lse_tiles: int | None, interpret):
    """Writes rows of `out`, a mutable `[T, H, D]`; returns the log-sum-exp `[lse_tiles, K, rows]` in powers of two.

    acc `[W, K, D, rows]`, ml `[W, K, 2, rows]`, tiles `[4, tiles]`, count `[1]`, sinks `[K, rows]` in powers of two or
    None, value_scale `[K]`.
    """
    has_sinks = sinks is not None
    operands = (acc, ml, tiles, count, value_scale, *([sinks] if has_sinks else []), out)
    lse_type = jax.ShapeDtypeStruct((lse_tiles or 1, shape.num_kv_heads, shape.rows), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, shape, has_sinks, lse_tiles is not None),
        out_type=lse_type,
        scratch_types=[
            tiled((shape.rows, shape.head_dim), out.dtype),
            plgpu.SMEM((shape.rows, shape.head_dim), out.dtype),
            plgpu.SMEM((shape.rows,), jnp.float32),
        ],
        grid=(2 * shape.ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="paged_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)


def _kernel(
    shape: DecodeShape,
    has_sinks: bool,
    has_lse: bool,
    acc_in,  # [W, K, D, rows] in GMEM, as are all down to `lse`
    ml_in,  # [W, K, 2, rows]
    tiles,  # [4, tiles]
    count,  # [1]
    value_scale,  # [K]
    *refs,
):
    # sinks [K, rows] where there are some; out [T, H, D]; lse [tiles, K, rows]; then in SMEM
    # turned [rows, D], out_tile [rows, D] and lse_tile [rows]
    sinks, (out, lse, turned, out_tile, lse_tile) = (refs[0] if has_sinks else None), refs[-5:]
    heads, rows, group = shape.num_kv_heads, shape.rows, shape.group

    def load(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def fold(item, kv_head, state):
        m, l, acc = state
        own = load(ml_in.at[item, kv_head, 0], COLUMNS)
        new = jnp.maximum(m, own)
        keep, add = power_of_two(m - new), power_of_two(own - new)
        l = l * keep + load(ml_in.at[item, kv_head, 1], COLUMNS) * add
        part = load(acc_in.at[item, kv_head], plgpu.Layout.WGMMA)
        return new, l, acc * along(keep, 1, acc.shape) + part * along(add, 1, acc.shape)

    def one(i, _):
        index = lax.axis_index("cta") + i * 2 * shape.ctas
        tile, kv_head = lax.div(index, heads), lax.rem(index, heads)
        nothing = (
            plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((shape.head_dim, rows), jnp.float32), plgpu.Layout.WGMMA),
        )
        m, l, acc = lax.fori_loop(
            tiles[FIRST, tile], tiles[LAST, tile], lambda item, state: fold(item, kv_head, state), nothing
        )
        if has_sinks:
            sink = load(sinks.at[kv_head], COLUMNS)
            new = jnp.maximum(m, shift_of(sink))
            keep = power_of_two(m - new)
            m, l, acc = new, l * keep + jnp.exp2(sink - new), acc * along(keep, 1, acc.shape)
        plgpu.wait_smem_to_gmem(0)  # the last tile's results have left
        if has_lse:
            lse_tile[...] = m + jnp.log2(l)
        acc = acc * along(value_scale[kv_head] / l, 1, acc.shape)
        turned.transpose((1, 0))[...] = acc.astype(out.dtype)
        out_tile[...] = plgpu.load(turned, layout=EIGHT_ROWS)  # TMA takes any run of rows only of a plain tile
        plgpu.commit_smem()
        if has_lse:
            plgpu.copy_smem_to_gmem(lse_tile, lse.at[tile, kv_head])
        first_row = kv_head * group - shape.first_head(kv_head, out.shape[1])

        def put(t, _):
            source = out_tile.at[pl.ds(t * shape.rows_per_token + first_row, group)]
            plgpu.copy_smem_to_gmem(source, out.at[tiles[TOKEN, tile] + t, pl.ds(kv_head * group, group)])

        lax.fori_loop(0, tiles[TOKENS, tile], put, None)

    lax.fori_loop(0, jnp.maximum(pl.cdiv(count[0] * heads - lax.axis_index("cta"), 2 * shape.ctas), 0), one, None)
    plgpu.wait_smem_to_gmem(0)
