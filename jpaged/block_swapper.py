"""BlockSwapper: moves blocks between the pool and host memory."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jpaged.cache_spec import CacheSpec
from jpaged.program_cache import ProgramCache
from jpaged.step import StepFunction
from jpaged.swap_space import CHUNK
from models.types import Pools
from pallas_kernels import put_blocks, take_blocks

PINNED = "pinned_host"


def swap_programs(step: StepFunction, num_blocks: int) -> tuple[tuple[Callable, tuple], tuple[Callable, tuple]]:
    """(pools, ids) -> blocks and (pools, ids, blocks) -> pools, jitted, each with the shapes that it takes."""
    pools, blocks = (step.state(size, 1).pools for size in (num_blocks, CHUNK))
    ids = jax.ShapeDtypeStruct((CHUNK,), np.int32, sharding=step.replicated)
    take, put = (partial(function, blocks_per_layer=num_blocks) for function in (take_blocks, put_blocks))
    return (
        (jax.jit(take, out_shardings=step.pool_sharding), (pools, ids)),
        (jax.jit(put, donate_argnums=0, out_shardings=step.pool_sharding), (pools, ids, blocks)),
    )


class BlockSwapper:
    """Two programs of CHUNK blocks of all layers. Copies are pinned where the devices know such memory, else numpy arrays."""

    def __init__(self, step: StepFunction, spec: CacheSpec, programs: ProgramCache):
        self._device = step.pool_sharding
        kinds = {memory.kind for memory in step.mesh.devices.flat[0].addressable_memories()}
        self._host = self._device.with_memory_kind(PINNED) if PINNED in kinds else None
        take, put = swap_programs(step, spec.num_blocks)
        tree = jax.tree.structure(take[1][0])
        self._take = programs.compile(("swap out",), *take, tree)
        self._put = programs.compile(("swap in",), *put, tree)

    def swap_out(self, pools: Pools, block_ids: list[int]) -> list[Pools]:
        """Copies of blocks, to be made before the pools' next step runs."""
        copies: list[Pools] = []
        for ids in _chunks(block_ids):
            taken = self._take(pools, ids)
            if self._host is None:
                copies.append(jax.device_get(taken))
                continue
            if copies:  # not the whole sequence at once a second time on the device
                jax.block_until_ready(copies[-1])
            copies.append(jax.device_put(taken, self._host))
        return copies

    def swap_in(self, pools: Pools, block_ids: list[int], copies: list[Pools]) -> Pools:
        """The pools, consumed, with copies in blocks block_ids; 0 for what is not needed any more."""
        for ids, taken in zip(_chunks(block_ids), copies, strict=True):
            if ids.any():
                pools = self._put(pools, ids, jax.device_put(taken, self._device))
        return pools


def _chunks(block_ids: list[int]) -> list[np.ndarray]:
    """Whole chunks, filled up with the null block."""
    ids = np.zeros(-(-len(block_ids) // CHUNK) * CHUNK, np.int32)
    ids[: len(block_ids)] = block_ids
    return list(ids.reshape(-1, CHUNK))
