"""Copy-on-write in a model's pools."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from models.layers import MODEL_AXIS
from models.types import Pools
from pallas_kernels import PoolLayout, copy_blocks


@jax.named_scope("block_copies")
def copy_kv_blocks(
    pools: Pools, copies: Int[Array, "C 2"], *, num_places: int, mesh: Mesh, layout: PoolLayout
) -> Pools:
    """Copies blocks (source, destination) in all their places; those to block 0, which nobody reads, come last and are none.

    Each device of the mesh copies its own part of the blocks. Where there is nothing to copy nothing is touched.
    """
    sources, destinations = jnp.unstack(copies, axis=1)
    num = jnp.sum(destinations != 0)
    by_kv_head = layout.partition_spec(MODEL_AXIS)
    copy = partial(copy_blocks, blocks_per_layer=len(pools) * pools[0].num_blocks // num_places)

    def local(pools, sources, destinations, num):
        # one question for all pools: on a GPU each loop of its own would be one to the host
        return jax.lax.cond(num > 0, copy, lambda pools, *_: pools, pools, sources, destinations, num)

    return jax.shard_map(local, mesh=mesh, in_specs=(by_kv_head, P(), P(), P()), out_specs=by_kv_head, check_vma=False)(
        pools, sources, destinations, num
    )
