"""`copy_blocks` for TPU: copies from HBM to HBM, those of all layers and pools under way at once."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..pool import LayerPool


def copy_blocks_mosaic_tpu(
    pools: tuple[LayerPool, ...], src, dst, num, blocks_per_layer, *, interpret=False
) -> tuple[LayerPool, ...]:
    """See `copy_blocks`. `interpret` is pallas_call's."""
    if pools[0].shard.form != "tpu":
        raise NotImplementedError(f"the pools' form must be tpu, got {pools[0].shard.form}")
    arrays = [pool.arrays[0] for pool in pools]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    copied = pl.pallas_call(
        functools.partial(_kernel, blocks_per_layer=blocks_per_layer),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(1,), in_specs=[hbm] * len(arrays), out_specs=[hbm] * len(arrays),
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={3 + index: index for index in range(len(arrays))},
        interpret=interpret,
        name="copy_blocks",
    )(src, dst, jnp.asarray(num, jnp.int32).reshape(1), *arrays)  # fmt: skip
    return tuple(LayerPool((array,), pool.shard) for array, pool in zip(copied, pools))


def _kernel(src, dst, num, *refs, blocks_per_layer: int | None):
    """src, dst: SMEM int32 [C]; num: SMEM int32 [1]; then pools, HBM [N, B, R / pk, pk, lanes], as given and again as
    they are returned; then a semaphore."""
    *pools, sem = refs[len(refs) // 2 :]

    def for_blocks(act):
        def pair(index, _):
            for pool in pools:
                size = blocks_per_layer or pool.shape[0]

                def layer(number, _):
                    base = number * size
                    act(pltpu.make_async_copy(pool.at[base + src[index]], pool.at[base + dst[index]], sem))
                    return 0

                jax.lax.fori_loop(0, pool.shape[0] // size, layer, 0)
            return 0

        jax.lax.fori_loop(0, num[0], pair, 0)

    for_blocks(lambda copy: copy.start())
    for_blocks(lambda copy: copy.wait())
