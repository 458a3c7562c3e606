"""`kv_write` for TPU: copies from HBM to HBM of just the tokens that are written, all under way at once.

Tokens are quantised and packed by XLA, which fuses that with what made them; here are only copies. Apart from
attention on purpose: to write inside the attention kernel would spare each token one trip through HBM (2 KD numbers, in
decode a thousandth of what attention reads), and would make attention wait for its own writes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..pool import LayerPool, pack_tokens, quantise
from ..tpu_dma import wait_copies

_RUN = 8  # tokens that one copy moves where their slots are neighbours, as in prefill


def kv_write_mosaic_tpu(
    pool: LayerPool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, k_scale, v_scale, *, interpret=False
) -> LayerPool:
    """See `kv_write`. Of neighbouring tokens with the same slot (padding) only the first is written. `interpret` is
    pallas_call's."""
    if pool.shard.form != "tpu":
        raise NotImplementedError(f"the pool's form must be tpu, got {pool.shard.form}")
    tokens = pack_tokens(quantise(k, k_scale, pool.shard), quantise(v, v_scale, pool.shard), pool.shard)
    (array,) = pool.arrays
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    array = pl.pallas_call(
        functools.partial(_kernel, run=min(_RUN, pool.block_size)),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(1,), in_specs=[hbm, hbm], out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={2: 0},
        interpret=interpret,
        name="kv_write",
    )(slot_mapping, tokens, array)  # fmt: skip
    return LayerPool((array,), pool.shard)


def _kernel(slots, tokens, _, pool, sem, *, run: int):
    """slots: SMEM int32 [T]; tokens: HBM [T, R / pk, pk, lanes]; pool: HBM [N, B, R / pk, pk, lanes]."""
    num_tokens, block_size = tokens.shape[0], pool.shape[1]

    def start(token, size):
        block, offset = jax.lax.div(slots[token], block_size), jax.lax.rem(slots[token], block_size)
        target = pool.at[block, pl.ds(offset, size)]
        pltpu.make_async_copy(tokens.at[pl.ds(token, size)], target, sem).start()

    def is_run(token):
        """Whether the tokens from this one on fill neighbouring slots of a block."""
        slot = slots[token]
        found = jax.lax.rem(slot, block_size) <= block_size - run
        for ahead in range(1, run - 1):
            found &= slots[token + ahead] == slot + ahead
        return found

    def step(carry):
        token, written = carry
        slot = slots[token]
        # In decode no slots are neighbours: ask for the last one first.
        last = jnp.minimum(token + (run - 1), num_tokens - 1)
        may_run = (token + run <= num_tokens) & (slots[last] == slot + (run - 1))
        runs = jax.lax.cond(may_run, lambda: is_run(token).astype(jnp.int32), lambda: jnp.int32(0)) == 1
        is_copy = (token > 0) & (slots[jnp.maximum(token - 1, 0)] == slot)
        alone = jnp.logical_not(runs | is_copy)
        pl.when(runs)(lambda: start(token, run))
        pl.when(alone)(lambda: start(token, 1))
        return token + jnp.where(runs, run, 1), written + jnp.where(runs, run, jnp.where(alone, 1, 0))

    _, written = jax.lax.while_loop(lambda carry: carry[0] < num_tokens, step, (jnp.int32(0), jnp.int32(0)))

    def moved(at, size):
        part = tokens.at[pl.ds(at, size)]
        return pltpu.make_async_copy(part, part, sem)

    wait_copies(written, num_tokens, moved)
