"""StepFunction: the one jitted step of a model on a mesh. It holds shapes alone: no weights, no memory, no chip needed.

The engine compiles its programs from it, the memory plan measures it, and tests compile it for chips that are not there.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged.batch import empty_step
from jpaged.config import EngineConfig
from jpaged.memory_plan import StepMemory
from jpaged.sampler import sample
from jpaged.sampling_batch import SamplingBatch
from models.config import ModelConfig
from models.layers import MODEL_AXIS
from models.registry import model_class
from models.types import ForwardBatch
from pallas_kernels import LayerPool, PoolLayout, pool_struct


def step(graphdef, treedef, max_logprobs, leaves, pool: LayerPool, batch: ForwardBatch, sampling: SamplingBatch):
    """(weights, pool, batch, sampling state) -> (pool, tokens): the whole of what the device does."""
    model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
    logits, pool = model(batch, pool)
    return pool, sample(logits, sampling, max_logprobs=max_logprobs)


class StepFunction:
    """`jitted` is the step, its pool donated; `arguments` are the shapes that a bucket's program takes.

    The mesh's platform decides the pool's form. Raises ValueError for a model that this mesh cannot hold.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        platform = mesh.devices.flat[0].platform
        self.config, self.model, self.mesh = config, model, mesh
        if model.num_kv_heads % mesh.size:
            raise ValueError(
                f"tensor_parallel_size ({mesh.size}) must divide the model's {model.num_kv_heads} KV heads"
            )
        if config.max_logprobs > model.vocab_size:
            raise ValueError(
                f"max_logprobs ({config.max_logprobs}) is over the vocabulary of {model.vocab_size} tokens"
            )
        self.dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
        self.layout = PoolLayout(
            model.num_kv_heads,
            model.head_dim,
            config.block_size_on(platform),
            self.dtype.name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            form=platform,
            num_shards=mesh.size,
        )

        def build():
            return model_class(model.architecture)(
                model,
                self.layout,
                dtype=self.dtype,
                mesh=mesh,
                roll_layers=platform == "cpu",
                implementation=config.attention_backend,
            )

        self.graphdef, self.abstract_state = nnx.get_abstract_model(build, mesh)
        self.abstract_leaves, self.treedef = jax.tree.flatten(self.abstract_state)
        self.pool_sharding = NamedSharding(mesh, self.layout.partition_spec(MODEL_AXIS))
        self._replicated = NamedSharding(mesh, P())
        self.jitted = jax.jit(
            partial(step, self.graphdef, self.treedef, config.max_logprobs),
            donate_argnums=1,
            out_shardings=(self.pool_sharding, self._replicated),
        )

    def pool(self, num_blocks: int) -> LayerPool:
        """The shapes of a pool with num_blocks blocks for each layer."""
        return pool_struct(self.layout, num_blocks * self.model.num_layers, self.pool_sharding)

    def arguments(self, bucket: tuple[int, int], num_blocks: int, max_blocks_per_seq: int) -> tuple:
        """What the step of this bucket is called with: leaves, pool, batch and sampling, as shapes with shardings."""
        host = empty_step(*bucket, num_seqs=self.config.max_num_seqs, max_blocks=max_blocks_per_seq)
        batch, sampling = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated), host
        )
        return self.abstract_leaves, self.pool(num_blocks), batch, sampling

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one device."""
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in self.abstract_leaves)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of all layers on one device."""
        return self.layout.shard.bytes_per_block * self.model.num_layers

    def measure(self, bucket: tuple[int, int]) -> StepMemory:
        """Compiles a bucket against a pool of two blocks and reads what it needs beside weights and pool."""
        max_blocks = -(-self.model.max_position // self.layout.block_size)
        analysis = self.jitted.lower(*self.arguments(bucket, 2, max_blocks)).compile().memory_analysis()
        return StepMemory(
            temp=analysis.temp_size_in_bytes,
            output=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )
