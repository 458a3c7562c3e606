"""The op `kv_write`."""

import jax
from jaxtyping import Array, Float, Int

from ..dispatch import call_implementation, lazily
from ..pool import LayerPool
from .reference import kv_write_reference
from .xla import kv_write_xla


def _reference(pool: LayerPool, k, v, slot_mapping, k_scale, v_scale) -> LayerPool:
    struct = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pool)
    return jax.pure_callback(kv_write_reference, struct, pool, k, v, slot_mapping, k_scale, v_scale)


_IMPLEMENTATIONS = {
    "mosaic_tpu": lazily(".kv_write.mosaic_tpu", "kv_write_mosaic_tpu"),
    "xla": kv_write_xla,
    "reference": _reference,
}
_DEFAULT = {"cpu": ("xla",), "gpu": ("xla",), "tpu": ("mosaic_tpu", "xla")}


def kv_write(
    pool: LayerPool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slot_mapping: Int[Array, "T"],
    *,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    implementation: str | None = None,
) -> LayerPool:
    """Writes each token's K and V to its slot; in place where the pool is donated, in time that follows T alone.

    Numbers are rounded to the pool's dtype; an int8 or fp8 pool stores them over `k_scale` and `v_scale` (scalars or
    `[K]`, None for 1), saturated. Slots must be in the pool (not checked on the device) and distinct outside
    the null block. `implementation` is static: "mosaic_tpu", "xla", "reference", or None for the best of the pool's
    form.
    Raises `ValueError` where `k` or `v` does not fit the pool.
    """
    expected = (*slot_mapping.shape, pool.num_kv_heads, pool.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected:
            raise ValueError(f"{name} must be [T, K, D] = {expected} for this pool, got {x.shape}")
    arguments = pool, k, v, slot_mapping, k_scale, v_scale
    return call_implementation(_IMPLEMENTATIONS, _DEFAULT, implementation, pool.shard.form, *arguments)
