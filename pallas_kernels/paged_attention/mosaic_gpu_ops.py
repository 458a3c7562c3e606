"""What the Hopper kernels share: matrix products, exact powers of two, shared-memory types."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

LOWEST = -(2.0**24)  # the shift of nothing; a score this low is as good as absent
ROWS = plgpu.Layout.WGMMA.reduce(1)  # a number for each row of a product
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# Whole tiles of [8, 64] numbers, two rows a warp: for few rows, or for between GMEM or plain SMEM and a tiled ref.
EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def tiled(shape: tuple[int, ...], dtype) -> plgpu.SMEM:
    """Shared memory that wgmma can read: 128 bytes a row of a swizzled tile."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def dot(a, b, interpret: bool):
    """`a @ b` of two tiled refs, float32. The interpreter of jax 0.11 and 0.12 has no accumulator that starts full."""
    if interpret:
        return _dot_interpreted(a, b)

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def dot_add(acc: jax.Array, a, b, interpret: bool):
    """`acc + a @ b`; `a` may also be an array in registers."""
    if interpret:
        return acc + _dot_interpreted(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def _dot_interpreted(a, b):
    product = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # wgmma reads as TMA writes, in the async proxy; these ordinary reads must be made to
    return product


def along(x: jax.Array, axis: int, shape: tuple[int, int]) -> jax.Array:
    """A vector along `axis` of `shape`, repeated over the other axis."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def shift_of(top: jax.Array) -> jax.Array:
    """An integer a little above `top`, as float32."""
    return (jnp.maximum(top, LOWEST).astype(jnp.int32) + 1).astype(jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Exactly `2.0 ** exponent` for integers at most 0; 0 where that is below every normal float32.

    Scaling by it rounds nothing, so a sum does not depend on when it was rescaled.
    """
    bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def zero_after(tile, count, first_row=0) -> None:
    """Clears the rows of a tiled `[U, D]` from row `count - first_row` on.

    V must be clean where weights are 0, since 0 * NaN is NaN.
    """
    shape = min(64, tile.shape[0]), 64  # a piece must leave the registers of an accumulator alone
    for r in range(0, tile.shape[0], shape[0]):
        offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=EIGHT_ROWS) + (first_row + r)
        for c in range(0, tile.shape[1], shape[1]):
            here = pl.ds(r, shape[0]), pl.ds(c, shape[1])
            piece = plgpu.load(tile.at[here], layout=EIGHT_ROWS)
            zeros = plgpu.layout_cast(jnp.zeros(shape, tile.dtype), EIGHT_ROWS)
            tile[here] = plgpu.layout_cast(jnp.where(offset < count, piece, zeros), EIGHT_ROWS)
    plgpu.commit_smem()


def stored_and_unpacked(stages: int, tile_kv: int, head_dim: int, stored, computed) -> tuple[list, list]:
    """Shared memory for K and V: stages as the pool stores them; of 8-bit numbers also a tile each for wgmma."""
    if stored == computed:
        return [tiled((stages, tile_kv, head_dim), stored)] * 2, []
    return [plgpu.SMEM((stages, tile_kv, head_dim), stored)] * 2, [tiled((tile_kv, head_dim), computed)] * 2


def unpack(stored, tile, count=None) -> None:
    """Turns a `[U, D]` of 8-bit numbers into 16-bit ones, exactly; rows from row `count` on become 0."""
    shape = 64, 64
    for r in range(0, tile.shape[0], shape[0]):
        offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=EIGHT_ROWS) + r
        for c in range(0, tile.shape[1], shape[1]):
            here = pl.ds(r, shape[0]), pl.ds(c, shape[1])
            piece = plgpu.load(stored.at[here], layout=EIGHT_ROWS, optimized=False)
            # Of float8 only float32 has a conversion; of int8 the one to bfloat16 is a few byte permutes.
            piece = (piece if stored.dtype == jnp.int8 else piece.astype(jnp.float32)).astype(tile.dtype)
            if count is not None:
                zeros = plgpu.layout_cast(jnp.zeros(shape, tile.dtype), EIGHT_ROWS)
                piece = plgpu.layout_cast(jnp.where(offset < count, piece, zeros), EIGHT_ROWS)
            tile[here] = piece
    plgpu.commit_smem()  # also of the reads: a TMA comes after them


def drain(free, stages: int, done) -> None:
    """Waits until the last of `done` tiles are free, which jax 0.11's interpreter wants to see at the end."""

    @pl.loop(jnp.maximum(done - stages, 0), done)
    def _(tile):
        plgpu.barrier_wait(free.at[jax.lax.rem(tile, stages)])
