"""KernelCheck: `--check-kernels`, a debug mode that stops the engine where a kernel or a block id is wrong."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.batch import HostStep
from jpaged.cache_spec import CacheSpec
from jpaged.device_state import DeviceState, RowLoad
from jpaged.errors import KernelCheckFailed
from jpaged.step import StepFunction
from jpaged.step_input import forward_batch
from models.attention import attention_difference

FIRST_STEPS, EVERY = 8, 64  # the steps whose attention is computed twice
LIMIT = 0.03  # of the largest output: kernels multiply in bfloat16; a wrong one is off by as much as the outputs are


class KernelCheck:
    """Looks at every step's block ids on the host, and at some steps' tables and attention on the device.

    Attention is given random queries over the KV that the step left in one layer's pool, and compared with plain XLA's;
    the pool is only read. Writes are seen by it as far as they are read.
    """

    def __init__(self, step: StepFunction, spec: CacheSpec, kv_scales: jax.Array | None):
        self.step, self.spec, self.kv_scales = step, spec, kv_scales
        self.num_steps = 0
        self._program = cache(lambda bucket, group: jax.jit(partial(_look, step, bucket, group)))

    def __call__(self, host_step: HostStep, state: DeviceState) -> None:
        """Checks a step that has been given to the devices. Raises KernelCheckFailed."""
        self.num_steps += 1
        self._check_ids("the host sends", self._sent_ids(host_step))
        if self.num_steps > FIRST_STEPS and self.num_steps % EVERY:
            return
        layer = self.num_steps % self.step.model.num_layers
        group, place = self.step.groups.of_layers[layer]
        pool = state.pools[0 if self.step.roll_layers else place]
        first_block = place * self.spec.num_blocks if self.step.roll_layers else 0
        scales = None if self.kv_scales is None else self.kv_scales[layer]
        arguments = pool, state.rows, host_step.buffer, first_block, scales, self.num_steps
        found = self._program(host_step.bucket, group)(*arguments)
        difference, *ids = map(np.asarray, found)
        self._check_ids("the device's tables name", np.array(ids))
        if not difference <= LIMIT:  # NaN is not
            raise KernelCheckFailed(
                f"step {self.num_steps}, layer {layer}: the kernel's attention is {difference:.2g} of the largest "
                f"output away from plain XLA's; the limit is {LIMIT}"
            )

    def _sent_ids(self, host_step: HostStep) -> np.ndarray:
        loads = map(RowLoad.packing(self.spec.table_width).views, host_step.row_loads)
        step_input = self.step.packing(host_step.bucket).views(host_step.buffer)
        ids = [step_input.table_updates[:, 2], step_input.block_copies, *(load.block_tables for load in loads)]
        return np.concatenate([part.ravel() for part in ids])

    def _check_ids(self, who: str, ids: np.ndarray) -> None:
        wrong = ids[(ids < 0) | (ids >= self.spec.num_blocks)]
        if wrong.size:
            raise KernelCheckFailed(
                f"step {self.num_steps}: {who} block {wrong[0]}; the pool has blocks 0 to {self.spec.num_blocks - 1}"
            )


def _look(step: StepFunction, bucket: tuple[int, int], group: int, pool, rows, buffer, first_block, scales, seed):
    """(difference of attention, least and greatest block id that the step's tables and slots name)."""
    windows = step.groups.windows
    batch = forward_batch(step.packing(bucket).unpack(buffer), rows, pool.block_size, len(windows))
    meta = batch.attention[group]
    ids = jnp.concatenate([meta.block_tables.ravel(), meta.slot_mapping // pool.block_size])
    shape = bucket[0], step.model.num_heads, step.model.head_dim
    q = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    shifted = meta.at_block(first_block, pool.block_size)
    attend = partial(attention_difference, mesh=step.mesh, layout=step.layout, window=windows[group])
    difference = attend(q, pool, shifted, scales, implementation=step.config.attention_backend)
    return difference, jnp.min(ids), jnp.max(ids)
