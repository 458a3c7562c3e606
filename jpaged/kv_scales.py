"""The scales of a quantised KV pool: one a layer, KV head, and K or V, from what the model makes of a few fixed texts.

A stored number is x / scale, rounded to nearest and saturated (`kv_write`). Scales follow from the model and the pool's
dtype alone, never from requests: a request's tokens must not depend on who came first.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jpaged.prefill_batch import prefill_batch
from jpaged.program_cache import ProgramCache
from jpaged.step import StepFunction
from models.layers import MODEL_AXIS
from pallas_kernels import PoolLayout, kv_absmax

# Room over the largest number that the texts give, for what saturates is lost. It costs int8 resolution, fp8 none.
MARGIN = {"int8": 1.125, "float8_e4m3fn": 8.0}
TEXTS = (
    "The lighthouse keeper's daughter had counted 1,482 ships before the winter of 1907, and not one of them had "
    "answered her lamp. Why should they? From the sea it looked like any other star: small, cold, and a long way off.",
    "<|user|>\nWhat is 17 * 23, and how do you work it out without a calculator?\n<|assistant|>\n17 * 23 = 17 * 20 + "
    "17 * 3 = 340 + 51 = 391. So the answer is 391.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    result, i, j = [], 0, 0\n    while i < len(left) "
    "and j < len(right):\n        if left[i] <= right[j]:\n            result.append(left[i]); i += 1\n        else:\n"
    "            result.append(right[j]); j += 1\n    return result + left[i:] + right[j:]\n",
    '{"name": "Zoë", "scores": [9.5, -3.25e-7, null], "tags": ["a", "b"], "url": "https://example.org/?q=1&r=%20"}\n\n'
    "| id | value |\n|---:|:-----|\n| 10 | true |\n| 11 | false |\n",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein. L'été dernier, nous étions à la mer. El niño comió una "
    "manzana. 今日は天気がいいですね。 Сегодня хорошая погода. 🙂🚀",
    "the the the the the the the the, and then ... !!! ??? --- === ### \n\n\n\t\t1 2 3 4 5 6 7 8 9 10 A B C D E F G",
)


def with_kv_scales(
    step: StepFunction, weights: nnx.State, encode: Callable[[str], list[int]], programs: ProgramCache
) -> nnx.State:
    """The state of a step with a quantised pool, from its weights: runs the texts once through the model, with a small
    pool of the weights' own dtype."""
    plain = StepFunction(replace(step.config, kv_cache_dtype="auto"), step.model, step.mesh)
    assert not plain.layout.is_quantised
    texts = [encode(text)[: step.model.max_position] for text in TEXTS]
    groups = plain.groups
    batch, num_blocks = prefill_batch(texts, plain.layout.block_size, len(groups.windows))

    def largest(leaves, batch):
        model = nnx.merge(plain.graphdef, jax.tree.unflatten(plain.treedef, leaves))
        _, pools = model(batch, plain.make_pools(num_blocks))
        blocks = np.arange(1, num_blocks).reshape(len(groups.windows), -1)  # of each group
        if plain.roll_layers:
            return _largest_in(
                pools[0], np.stack([place * num_blocks + blocks[g] for g, place in groups.of_layers]), plain
            )
        return jnp.stack([_largest_in(pools[place], blocks[g], plain) for g, place in groups.of_layers])

    batch = jax.device_put(batch, plain.replicated)
    jitted = jax.jit(largest, out_shardings=plain.replicated)
    arguments = jax.tree.leaves(weights), batch
    program = programs.compile(("scales", *map(len, texts)), jitted, arguments, jax.tree.structure(0))
    scales = scales_of(np.asarray(program(*arguments)), step.layout)
    abstract = step.abstract_state["kv_scales"]
    found = {"kv_scales": abstract.replace(jax.device_put(scales, abstract.get_value().sharding))}
    return nnx.merge_state(weights, nnx.State(found))


def _largest_in(pool, ids: np.ndarray, step: StepFunction) -> jax.Array:
    """[..., 2, K]: the largest magnitudes in blocks ids [..., n]."""
    return jax.shard_map(
        lambda pool: kv_absmax(pool, ids),
        mesh=step.mesh,
        in_specs=step.layout.partition_spec(MODEL_AXIS),
        out_specs=P(*[None] * ids.ndim, MODEL_AXIS),
        check_vma=False,
    )(pool)


def scales_of(largest: np.ndarray, layout: PoolLayout) -> np.ndarray:
    """Scales that keep numbers of up to `largest` times the margin from saturating; 1 where there are none.

    Rounded up to 5 significant bits: what another device or mesh computes differs in its last bits, and its scales must
    not.
    """
    fraction, exponent = np.frexp(largest.astype(np.float64) * (MARGIN[layout.dtype] / layout.largest))
    rounded = np.ldexp(np.ceil(fraction * 32) / 32, exponent)
    return np.where(largest > 0, rounded, 1).astype(np.float32)
