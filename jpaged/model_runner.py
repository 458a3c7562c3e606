"""ModelRunner: weights and pool on the devices, and the compiled steps that join them."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.buckets import Buckets
from jpaged.config import EngineConfig
from jpaged.memory_plan import MemoryPlan, plan_memory
from jpaged.program_cache import ProgramCache, cache_dir, fingerprint
from jpaged.programs import Programs
from jpaged.sampling_batch import Sampled, SamplingBatch
from jpaged.step import StepFunction
from models.layers import MODEL_AXIS
from models.loading import load_state
from models.types import ForwardBatch
from models.weights import Checkpoint
from pallas_kernels import LayerPool, make_pool


@dataclass(frozen=True)
class StepResult:
    """A step's tokens on the host, one a sampled sequence; the log-probs only where some request asked for them."""

    token_ids: list[int]
    logprobs: Sampled | None  # numpy arrays


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """The first devices as (data, model). Raises ValueError where there are too few."""
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}, but JAX sees {len(devices)} device(s): {devices}"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]).reshape(1, -1), ("data", MODEL_AXIS))


def plan_step_memory(step: StepFunction, buckets: Buckets, device: jax.Device | None = None) -> MemoryPlan:
    """Sizes the pool; compiles the largest bucket where that decides it. device: another than the mesh's first."""
    config, device = step.config, device or step.mesh.devices.flat[0]
    is_measured = (
        device.platform != "cpu" and config.num_blocks_override is None and config.kv_cache_memory_bytes is None
    )
    return plan_memory(
        config,
        max_position=step.model.max_position,
        block_size=step.layout.block_size,
        bytes_per_block=step.bytes_per_block,
        weights=step.weight_bytes,
        device=device,
        step=step.measure((buckets.tokens[-1], buckets.max_rows)) if is_measured else None,
        num_programs=len(buckets.all()),
    )


class ModelRunner:
    """Loads a checkpoint, sizes and owns the pool, compiles the step for every bucket, and runs it.

    Raises ValueError for a model that this mesh cannot hold.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, on_compiled=lambda phase: None):
        self.config = config
        self.mesh = make_mesh(config.tensor_parallel_size)
        self.model_config = checkpoint.config
        self.step = StepFunction(config, self.model_config, self.mesh)
        self.layout = self.step.layout
        self.leaves = jax.tree.leaves(load_state(checkpoint, self.step.abstract_state))
        self.buckets = Buckets(config.max_num_batched_tokens, config.max_num_seqs, config.token_buckets)
        self.memory = plan_step_memory(self.step, self.buckets)
        self.spec = self.memory.spec
        self._program_cache = ProgramCache(cache_dir(config.compilation_cache_dir), self._fingerprint())

        def on_prepared(phase: str) -> None:
            if self._program_cache.has_compiled:
                on_compiled(phase)

        self.programs = Programs(self._compile, self.buckets.all(), on_prepared)
        self.pool = self._make_pool()

    def run(self, batch: ForwardBatch, sampling: SamplingBatch, num_sampled: int) -> StepResult:
        """Computes one step. num_sampled rows of the result are real."""
        program = self.programs[batch.token_ids.shape[0], batch.logits_indices.shape[0]]
        self.pool, sampled = program(self.leaves, self.pool, batch, sampling)
        token_ids = np.asarray(sampled.token_ids)[:num_sampled].tolist()
        wants_logprobs = bool(sampling.wants_logprobs.any())
        return StepResult(token_ids, jax.tree.map(np.asarray, sampled) if wants_logprobs else None)

    def reset_pool(self) -> None:
        """Replaces a pool that a failed step may have consumed."""
        self.pool = None
        self.pool = self._make_pool()

    def _make_pool(self) -> LayerPool:
        struct = self.step.pool(self.spec.num_blocks)
        make = jax.jit(partial(make_pool, self.layout, struct.num_blocks), out_shardings=self.step.pool_sharding)
        return self._program_cache.compile(("pool",), make, (), jax.tree.structure(struct))()

    def _fingerprint(self) -> str:
        config = self.config
        return fingerprint(
            self.model_config, self.layout, self.step.dtype, self.spec, self.mesh.devices.shape,
            config.max_num_seqs, config.max_logprobs, config.attention_backend,
        )  # fmt: skip

    def _compile(self, bucket: tuple[int, int]):
        arguments = self.step.arguments(bucket, self.spec.num_blocks, self.spec.max_blocks_per_seq)
        return self._program_cache.compile(
            bucket, self.step.jitted, arguments, jax.tree.structure((self.pool, Sampled.empty()))
        )
