"""StepFunction: the one jitted step of a model on a mesh. It holds shapes alone: no weights, no memory, no chip needed.

The engine compiles its programs from it, the memory plan measures it, and tests compile it for chips that are not there.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jpaged.config import EngineConfig
from jpaged.memory_plan import StepMemory
from jpaged.packed_step import PackedStep
from jpaged.sampler import sample
from jpaged.sampling_batch import Sampled
from models.config import ModelConfig
from models.layers import MODEL_AXIS
from models.registry import model_class
from models.types import Pools
from pallas_kernels import PoolLayout, make_pool, pool_struct


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What stays on the device from step to step. Donated: a step makes the next one of it, in place."""

    pools: Pools
    newest_tokens: Int[Array, "rows"]  # the token sampled last for the sequence in each of the host's rows


def step(graphdef, treedef, max_logprobs, packing: PackedStep, leaves, state: DeviceState, buffer):
    """(weights, state, host's input) -> (state, tokens): the whole of what the device does.

    A token id below 0 stands for the newest token of row -1 - id: the host has not seen it yet.
    """
    batch, sampling = packing.unpack(buffer)
    newest = state.newest_tokens[jnp.maximum(-1 - batch.token_ids, 0)]
    batch = replace(batch, token_ids=jnp.where(batch.token_ids < 0, newest, batch.token_ids))
    model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
    logits, pools = model(batch, state.pools)
    sampled = sample(logits, sampling, max_logprobs=max_logprobs)
    newest_tokens = state.newest_tokens.at[sampling.state_rows].set(sampled.token_ids, mode="drop")
    return DeviceState(pools, newest_tokens), sampled


class StepFunction:
    """`jitted` makes a program's step, its state donated; `arguments` are the shapes that it takes.

    The mesh's platform decides the pools' form. Raises ValueError for a model that this mesh cannot hold.
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

        self.roll_layers = platform == "cpu"

        def build():
            return model_class(model.architecture)(
                model,
                self.layout,
                dtype=self.dtype,
                mesh=mesh,
                roll_layers=self.roll_layers,
                implementation=config.attention_backend,
            )

        self.graphdef, self.abstract_state = nnx.get_abstract_model(build, mesh)
        self.abstract_leaves, self.treedef = jax.tree.flatten(self.abstract_state)
        self.pool_sharding = NamedSharding(mesh, self.layout.partition_spec(MODEL_AXIS))
        self._replicated = NamedSharding(mesh, P())
        self.state_shardings = DeviceState(self.pool_sharding, self._replicated)

    def jitted(self, packing: PackedStep):
        """The step of one program."""
        return jax.jit(
            partial(step, self.graphdef, self.treedef, self.config.max_logprobs, packing),
            donate_argnums=1,
            out_shardings=(self.state_shardings, self._replicated),
        )

    def packing(self, bucket: tuple[int, int], max_blocks_per_seq: int) -> PackedStep:
        """The host's input to the step of a bucket."""
        return PackedStep(*bucket, self.config.max_num_seqs, max_blocks_per_seq)

    def state(self, num_blocks: int) -> DeviceState:
        """The shapes of the state with num_blocks blocks for each layer."""
        pools = self._pools(num_blocks, partial(pool_struct, sharding=self.pool_sharding))
        return DeviceState(pools, self._struct(self.config.max_num_seqs))

    def make_state(self, num_blocks: int) -> DeviceState:
        """The state before the first step: zeros. To be jitted, with `state_shardings`."""
        return DeviceState(self._pools(num_blocks, make_pool), jnp.zeros(self.config.max_num_seqs, jnp.int32))

    def _pools(self, num_blocks: int, make) -> Pools:
        """One pool for each layer, or one of all layers where they are a loop on the device.

        A pool a layer keeps the elements of an array below 2**31, and needs no block tables of its own.
        """
        num_layers = self.model.num_layers
        num_pools = 1 if self.roll_layers else num_layers
        return tuple(make(self.layout, num_blocks * num_layers // num_pools) for _ in range(num_pools))

    def arguments(self, packing: PackedStep, num_blocks: int) -> tuple:
        """What a step is called with: leaves, state and the host's input, as shapes with shardings."""
        return self.abstract_leaves, self.state(num_blocks), self._struct(packing.size)

    @property
    def result_structure(self):
        """The tree of what a step returns."""
        return jax.tree.structure((self.state(2), Sampled.empty()))

    def _struct(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self._replicated)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one device."""
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in self.abstract_leaves)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of all layers on one device."""
        return self.layout.shard.bytes_per_block * self.model.num_layers

    def measure(self, bucket: tuple[int, int]) -> StepMemory:
        """Compiles a bucket against pools of two blocks and reads what it needs beside weights and pool."""
        max_blocks = -(-self.model.max_position // self.layout.block_size)
        packing = self.packing(bucket, max_blocks)
        analysis = self.jitted(packing).lower(*self.arguments(packing, 2)).compile().memory_analysis()
        return StepMemory(
            temp=analysis.temp_size_in_bytes,
            output=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )
