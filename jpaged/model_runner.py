"""ModelRunner: weights, pool and mesh on the devices, and the one jitted step that joins them."""

import logging
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged.batch import empty_step
from jpaged.buckets import Buckets
from jpaged.config import EngineConfig
from jpaged.memory_plan import MemoryPlan, StepMemory, plan_memory
from jpaged.program_cache import ProgramCache, cache_dir, fingerprint
from jpaged.programs import Programs
from jpaged.sampler import sample
from jpaged.sampling_batch import Sampled, SamplingBatch
from models.layers import MODEL_AXIS
from models.loading import load_state
from models.registry import model_class
from models.types import ForwardBatch
from models.weights import Checkpoint
from pallas_kernels import LayerPool, PoolLayout, make_pool, pool_struct

logger = logging.getLogger(__name__)


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


def step(graphdef, treedef, max_logprobs, leaves, pool: LayerPool, batch: ForwardBatch, sampling: SamplingBatch):
    """(weights, pool, batch, sampling state) -> (pool, tokens): the whole of what the device does."""
    model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
    logits, pool = model(batch, pool)
    return pool, sample(logits, sampling, max_logprobs=max_logprobs)


class ModelRunner:
    """Loads a checkpoint, sizes and owns the pool, compiles the step for every bucket, and runs it.

    Raises ValueError for a model that this mesh cannot hold.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, on_compiled=lambda phase: None):
        self.config = config
        self.mesh = make_mesh(config.tensor_parallel_size)
        self.model_config = model = checkpoint.config
        if model.num_kv_heads % config.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size ({config.tensor_parallel_size}) must divide the model's {model.num_kv_heads} KV heads"
            )
        if config.max_logprobs > model.vocab_size:
            raise ValueError(
                f"max_logprobs ({config.max_logprobs}) is over the vocabulary of {model.vocab_size} tokens"
            )
        self.dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
        platform = self.mesh.devices.flat[0].platform
        pool_dtype = self.dtype.name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.layout = PoolLayout(
            model.num_kv_heads,
            model.head_dim,
            config.block_size_on(platform),
            pool_dtype,
            form=platform,
            num_shards=config.tensor_parallel_size,
        )

        def build():
            return model_class(model.architecture)(
                model,
                self.layout,
                dtype=self.dtype,
                mesh=self.mesh,
                roll_layers=platform == "cpu",
                implementation=config.attention_backend,
            )

        self.graphdef, abstract_state = nnx.get_abstract_model(build, self.mesh)
        self.leaves, self.treedef = jax.tree.flatten(load_state(checkpoint, abstract_state))
        self._pool_sharding = NamedSharding(self.mesh, self.layout.partition_spec(MODEL_AXIS))
        self._step = jax.jit(
            partial(step, self.graphdef, self.treedef, config.max_logprobs),
            donate_argnums=1,
            out_shardings=(self._pool_sharding, NamedSharding(self.mesh, P())),
        )
        self.buckets = Buckets(config.max_num_batched_tokens, config.max_num_seqs, config.token_buckets)
        self.memory = self._plan_memory()
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
        num_blocks = self.spec.num_blocks * self.model_config.num_layers
        make = jax.jit(partial(make_pool, self.layout, num_blocks), out_shardings=self._pool_sharding)
        out_tree = jax.tree.structure(pool_struct(self.layout, num_blocks))
        return self._program_cache.compile(("pool",), make, (), out_tree)()

    def _fingerprint(self) -> str:
        config = self.config
        return fingerprint(
            self.model_config, self.layout, self.dtype, self.spec, self.mesh.devices.shape,
            config.max_num_seqs, config.max_logprobs, config.attention_backend,
        )  # fmt: skip

    def _compile(self, bucket: tuple[int, int]):
        arguments = self._arguments(bucket, self.spec.num_blocks, self.spec.max_blocks_per_seq)
        return self._program_cache.compile(
            bucket, self._step, arguments, jax.tree.structure((self.pool, Sampled.empty()))
        )

    def _arguments(self, bucket: tuple[int, int], num_blocks: int, max_blocks_per_seq: int) -> tuple:
        """What the step of this bucket is called with; the pool only as shapes."""
        pool = pool_struct(self.layout, num_blocks * self.model_config.num_layers, self._pool_sharding)
        batch, sampling = empty_step(*bucket, num_seqs=self.config.max_num_seqs, max_blocks=max_blocks_per_seq)
        return self.leaves, pool, batch, sampling

    def _plan_memory(self) -> MemoryPlan:
        device = self.mesh.devices.flat[0]
        config, num_layers, shards = self.config, self.model_config.num_layers, self.config.tensor_parallel_size
        weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in self.leaves)
        is_measured = (
            device.platform != "cpu" and config.num_blocks_override is None and config.kv_cache_memory_bytes is None
        )
        return plan_memory(
            config,
            max_position=self.model_config.max_position,
            block_size=self.layout.block_size,
            bytes_per_block=self.layout.bytes_per_block * num_layers // shards,
            weights=weights,
            device=device,
            step=self._measure_largest_step() if is_measured else None,
            num_programs=len(self.buckets.all()),
        )

    def _measure_largest_step(self) -> StepMemory:
        """Compiles the largest bucket against a pool of two blocks and reads what it needs beside weights and pool."""
        largest = (self.buckets.tokens[-1], self.buckets.max_rows)
        max_blocks = -(-self.model_config.max_position // self.layout.block_size)
        analysis = self._step.lower(*self._arguments(largest, 2, max_blocks)).compile().memory_analysis()
        return StepMemory(
            temp=analysis.temp_size_in_bytes,
            output=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )
