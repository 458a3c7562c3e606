"""The op `copy_blocks`."""

import jax
from jaxtyping import Array, Int

from ..dispatch import call_implementation, lazily
from ..pool import LayerPool
from .reference import copy_blocks_reference
from .xla import copy_blocks_xla


def _reference(pools, src, dst, num, blocks_per_layer):
    struct = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pools)
    return jax.pure_callback(copy_blocks_reference, struct, pools, src, dst, num, blocks_per_layer)


_IMPLEMENTATIONS = {
    "mosaic_tpu": lazily(".block_copy.mosaic_tpu", "copy_blocks_mosaic_tpu"),
    "xla": copy_blocks_xla,
    "reference": _reference,
}
_DEFAULT = {"cpu": ("xla",), "gpu": ("xla",), "tpu": ("mosaic_tpu", "xla")}


def copy_blocks(
    pools: tuple[LayerPool, ...],
    src: Int[Array, "C"],
    dst: Int[Array, "C"],
    num: Int[Array, ""] | int,
    *,
    blocks_per_layer: int | None = None,
    implementation: str | None = None,
) -> tuple[LayerPool, ...]:
    """Copies block `src[i]` to `dst[i]` for `i < num` in every layer of every pool; in place where they are donated.

    A pool that holds several layers one after the other has block `b` of layer `l` at `l * blocks_per_layer + b`; None:
    each pool is one layer. The first `num` destinations are distinct, and none of them is among the first `num` sources
    (not checked on the device). Time follows `num`, not `C`. `implementation` is static: "mosaic_tpu", "xla",
    "reference", or None for the best of the pools' form.
    Raises `ValueError` where `src` and `dst` differ in length, `blocks_per_layer` does not divide a pool, or pools
    differ in form.
    """
    if src.shape != dst.shape or len(src.shape) != 1:
        raise ValueError(f"src and dst must be [C] alike, got {src.shape} and {dst.shape}")
    if not pools:
        return pools
    for pool in pools:
        if blocks_per_layer is not None and (blocks_per_layer < 1 or pool.num_blocks % blocks_per_layer):
            raise ValueError(f"blocks_per_layer must divide num_blocks = {pool.num_blocks}, got {blocks_per_layer}")
    forms = {pool.shard.form for pool in pools}
    if len(forms) > 1:
        raise ValueError(f"pools must be of one form, got {', '.join(sorted(forms))}")
    arguments = pools, src, dst, num, blocks_per_layer
    return call_implementation(_IMPLEMENTATIONS, _DEFAULT, implementation, forms.pop(), *arguments)
