"""LayerPool: the arrays of a KV pool, and the ways into them that plain XLA ops have.

Callers carry a `LayerPool` about, donate it and shard it; only this package looks inside.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from .layout import HALF_LANES, PoolLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPool:
    """A pool in its physical form. Opaque outside `pallas_kernels`; made by `make_pool`.

    Leaves may also be `ShapeDtypeStruct`, `PartitionSpec` or `Sharding`: jit's spec trees have this shape. Inside
    `shard_map` a pool is one shard of itself; `shard` describes that shard on both sides.
    """

    arrays: tuple[Any, ...]
    shard: PoolLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def num_shards(self) -> int:
        """How many shards these arrays are made of: 1 inside `shard_map`."""
        axis = self.shard.sharded_axis
        return self.arrays[0].shape[axis] // self.shard.shapes(1)[0][axis]

    @property
    def num_kv_heads(self) -> int:
        return self.num_shards * self.shard.num_kv_heads

    @property
    def block_size(self) -> int:
        return self.shard.block_size

    @property
    def head_dim(self) -> int:
        return self.shard.head_dim


def pool_struct(layout: PoolLayout, num_blocks: int, sharding=None) -> LayerPool:
    """A pool as `ShapeDtypeStruct` leaves, to lower and compile without allocating.

    Raises `ValueError` for less than two blocks.
    """
    if num_blocks < 2:
        raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
    shapes = layout.shapes(num_blocks)
    return LayerPool(
        tuple(jax.ShapeDtypeStruct(shape, layout.storage_dtype, sharding=sharding) for shape in shapes), layout.shard
    )


def make_pool(layout: PoolLayout, num_blocks: int, sharding=None) -> LayerPool:
    """A pool of `num_blocks` zeroed blocks, the null block included."""
    struct = pool_struct(layout, num_blocks, sharding)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), struct)


def quantise(x: jax.Array, scale: jax.Array | None, layout: PoolLayout) -> jax.Array:
    """`x` `[..., K, D]` as the pool stores it: over `scale` (a scalar or `[K]`; None is 1), rounded, saturated."""
    if scale is not None:
        x = x.astype(jnp.float32) / jnp.asarray(scale, jnp.float32).reshape(-1, 1)
    if layout.is_quantised:
        x = x.astype(jnp.float32)
        x = jnp.clip(jnp.round(x) if layout.dtype == "int8" else x, -layout.largest, layout.largest)
    x = x.astype(layout.dtype)
    return x if x.dtype == layout.storage_dtype else jax.lax.bitcast_convert_type(x, layout.storage_dtype)


def to_float32(stored: jax.Array, layout: PoolLayout) -> jax.Array:
    """The numbers that part of a pool stores, in float32, any scale still to be applied."""
    if stored.dtype != layout.dtype:
        stored = jax.lax.bitcast_convert_type(stored, jnp.dtype(layout.dtype))
    return stored.astype(jnp.float32)


def read_blocks(pool: LayerPool, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys `[..., K, D, B]` and values `[..., K, B, D]` of blocks `ids` `[...]` of one shard, float32, unscaled."""
    gathered = [array[ids] for array in pool.arrays]
    if pool.shard.form == "tpu":  # else XLA:TPU gives all of the pool, by copying it, the layout that its reader likes
        gathered = [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in gathered]
    gathered = [to_float32(x, pool.shard) for x in gathered]
    if pool.shard.form == "cpu":
        return tuple(gathered)
    keys, values = unpack_tokens(gathered[0], pool.shard)  # [..., B, K, D]
    return jnp.moveaxis(keys, -3, -1), jnp.moveaxis(values, -3, -2)


def kv_absmax(pool: LayerPool, ids: jax.Array) -> jax.Array:
    """The largest magnitudes of K and of V, `[..., 2, K]` float32, unscaled, in blocks `ids` `[..., n]` of one shard."""
    keys, values = read_blocks(pool, ids)
    return jnp.stack([jnp.max(jnp.abs(x), axis=(-4, -2, -1)) for x in (keys, values)], axis=-2)


def pack_tokens(k, v, layout: PoolLayout, xp=jnp):
    """The part of the gpu or tpu form's array that holds some tokens of one shard: k and v `[..., K, D]`.

    Returns `[..., K, 2, D]` or `[..., R / pk, pk, lanes]`, padding zero.
    """
    if layout.form == "gpu":
        return xp.stack([k, v], axis=-2)
    lead, width = k.shape[:-2], HALF_LANES if layout.packs_kv else layout.lanes
    both = xp.stack([k, v], axis=-2)  # [..., K, 2, D]
    both = xp.pad(both, [(0, 0)] * (both.ndim - 1) + [(0, width - layout.head_dim)])
    rows = both.reshape(*lead, layout.rows, layout.lanes)
    rows = xp.pad(rows, [(0, 0)] * len(lead) + [(0, layout.padded_rows - layout.rows), (0, 0)])
    return rows.reshape(*lead, -1, layout.packing, layout.lanes)


def unpack_tokens(packed, layout: PoolLayout):
    """The inverse of `pack_tokens`: k and v `[..., K, D]`."""
    if layout.form == "tpu":
        lead = packed.shape[:-3]
        rows = packed.reshape(*lead, layout.padded_rows, layout.lanes)[..., : layout.rows, :]
        packed = rows.reshape(*lead, layout.num_kv_heads, 2, -1)[..., : layout.head_dim]
    return packed[..., 0, :], packed[..., 1, :]


def logical_kv(pool: LayerPool) -> tuple[np.ndarray, np.ndarray]:
    """The whole pool on the host as float64 K and V, `[N, B, K, D]` each, unscaled: for references and tests."""
    numbers = [np.asarray(array).view(jnp.dtype(pool.shard.dtype)).astype(np.float64) for array in pool.arrays]
    if pool.shard.form == "cpu":
        return numbers[0].transpose(0, 3, 1, 2), numbers[1].transpose(0, 2, 1, 3)
    shards = np.split(numbers[0], pool.num_shards, axis=pool.shard.sharded_axis)
    keys, values = zip(*(unpack_tokens(shard, pool.shard) for shard in shards))
    return np.concatenate(keys, axis=2), np.concatenate(values, axis=2)


def pool_from_logical(keys: np.ndarray, values: np.ndarray, layout: PoolLayout) -> LayerPool:
    """The inverse of `logical_kv`: a pool holding K and V, `[N, B, K, D]` each, rounded to the layout's dtype."""
    if layout.form == "cpu":
        arrays = keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)
    else:
        split = (np.split(x, layout.num_shards, axis=2) for x in (keys, values))
        packed = [pack_tokens(k, v, layout.shard, np) for k, v in zip(*split)]
        arrays = (np.concatenate(packed, axis=layout.sharded_axis),)

    def store(numbers: np.ndarray) -> jax.Array:
        return jnp.asarray(np.ascontiguousarray(numbers).astype(jnp.dtype(layout.dtype)).view(layout.storage_dtype))

    return LayerPool(tuple(map(store, arrays)), layout.shard)
