"""StepFunction: the one jitted step of a model on a mesh. It holds shapes alone: no weights, no memory, no chip needed.

The engine compiles its programs from it, the memory plan measures it, and tests compile it for chips that are absent.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged.config import POOL_DTYPES, EngineConfig
from jpaged.device_state import DeviceState, RowLoad, RowState, extend_tables, load_rows
from jpaged.logits_edits import LogitsEdits, count_tokens, keep_logits
from jpaged.memory_plan import StepMemory
from jpaged.packing import Packing
from jpaged.sampler import sample
from jpaged.sampling_batch import Sampled
from jpaged.step_input import StepInput, forward_batch, max_sequences, next_decode, sampled_positions
from models.block_copies import copy_kv_blocks
from models.config import ModelConfig
from models.layers import MODEL_AXIS
from models.registry import model_class
from models.types import Pools
from pallas_kernels import PoolLayout, make_pool, pool_struct


def step(
    graphdef, treedef, copy, packing: Packing, max_logprobs: int, max_decodes: int, leaves, state: DeviceState, buffer
) -> tuple[DeviceState, Sampled]:
    """(weights, state, host's input) -> (state, tokens): the whole of what the device does.

    copy: `copy_kv_blocks` of this model and mesh.

    Where max_decodes is over 1 the step goes on decoding as long as the host says and somebody has not stopped.
    """
    host: StepInput = packing.unpack(buffer)
    model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
    rows = extend_tables(state.rows, host.table_updates)

    def compute(host: StepInput, state: DeviceState) -> tuple[DeviceState, Sampled]:
        block_size = state.pools[0].block_size
        batch = forward_batch(host, state.rows, block_size, len(model.groups.windows))
        logits, pools = model(batch, state.pools)
        sampling = jax.tree.map(lambda table: table[host.sampled_rows], state.rows.sampling)
        positions = sampled_positions(host)
        sampled = sample(logits, sampling, state.edits, positions, host.targets, max_logprobs=max_logprobs)
        newest = state.rows.newest_tokens.at[host.sampled_rows].set(sampled.token_ids)
        edits = keep_logits(state.edits, logits, sampling)
        edits = count_tokens(edits, jnp.where(sampling.keeps_logits > 0, 0, sampling.edit_slot), sampled.token_ids)
        return DeviceState(pools, replace(state.rows, newest_tokens=newest), edits), sampled

    pools = copy(state.pools, host.block_copies)
    state, first = compute(host, replace(state, pools=pools, rows=rows))
    if max_decodes == 1:
        return state, first
    stop_ids = state.rows.sampling.stop_ids[host.sampled_rows]

    def goes_on(carry):
        num_done, is_alive, *_ = carry
        return jnp.any(is_alive) & (num_done < max_decodes)

    def decode(carry):
        num_done, is_alive, host, state, tokens = carry
        host = next_decode(host, is_alive, len(state.rows.newest_tokens) - 1)
        state, sampled = compute(host, state)
        is_alive = is_alive & survives(sampled.token_ids, num_done + 1)
        return num_done + 1, is_alive, host, state, tokens.at[num_done].set(sampled.token_ids)

    def survives(token_ids, num_done):
        has_stopped = jnp.any(token_ids[:, None] == stop_ids, axis=1) | (token_ids < 0)
        return (num_done < host.limits) & ~has_stopped

    tokens = jnp.zeros((max_decodes, len(first.token_ids)), jnp.int32).at[0].set(first.token_ids)
    carry = jnp.int32(1), survives(first.token_ids, 1), host, state, tokens
    *_, state, tokens = jax.lax.while_loop(goes_on, decode, carry)
    return state, replace(first, token_ids=tokens)


class StepFunction:
    """`jitted` makes a program's step, its state donated; `arguments` are the shapes that it takes.

    The mesh's platform decides the pools' form. Raises ValueError for a model that this mesh cannot hold.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        platform = mesh.devices.flat[0].platform
        self.config, self.model, self.mesh = config, model, mesh
        self.groups = model.attention_groups
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
            self.dtype.name if config.kv_cache_dtype == "auto" else POOL_DTYPES[config.kv_cache_dtype],
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
        self.replicated = NamedSharding(mesh, P())
        rows, edits = jax.tree.map(lambda _: self.replicated, (RowState.initial(1, 1), LogitsEdits.shapes(1, 1)))
        # as the logits are: else a mesh would gather all of it in every step
        by_vocab = NamedSharding(mesh, P(None, MODEL_AXIS)) if model.vocab_size % mesh.size == 0 else self.replicated
        edits = replace(edits, seen=by_vocab, bias=by_vocab, kept=by_vocab)
        self.state_shardings = DeviceState(self.pool_sharding, rows, edits)

    def packing(self, bucket: tuple[int, int]) -> Packing:
        """How the host's input to a bucket's step, a `StepInput`, is packed."""
        return StepInput.packing(*bucket, self.config.max_num_seqs, len(self.groups.windows))

    def max_decodes(self, bucket: tuple[int, int]) -> int:
        """How many decodes one run of a bucket's program may hold: several only where every sequence is sampled."""
        num_tokens, num_sampled = bucket
        has_all_rows = num_sampled == max_sequences(num_tokens, self.config.max_num_seqs)
        return self.config.num_scheduler_steps if has_all_rows else 1

    def jitted(self, bucket: tuple[int, int]):
        """The step of one bucket."""
        copy = partial(copy_kv_blocks, num_places=self.groups.num_places, mesh=self.mesh, layout=self.layout)
        static = (
            self.graphdef, self.treedef, copy, self.packing(bucket), self.config.max_logprobs, self.max_decodes(bucket)
        )  # fmt: skip
        return jax.jit(partial(step, *static), donate_argnums=1, out_shardings=(self.state_shardings, self.replicated))

    def state(self, num_blocks: int, table_width: int) -> DeviceState:
        """The shapes of the state of num_blocks blocks."""
        pools = self._pools(num_blocks, partial(pool_struct, sharding=self.pool_sharding))
        kept = RowState.initial(self.config.max_num_seqs, table_width), LogitsEdits.shapes(*self._edits_size)
        shardings = self.state_shardings.rows, self.state_shardings.edits
        return DeviceState(pools, *jax.tree.map(lambda x, on: self._struct(x.shape, x.dtype, on), kept, shardings))

    def make_state(self, num_blocks: int, table_width: int) -> DeviceState:
        """The state before the first step. To be jitted, with `state_shardings`."""
        rows = RowState.initial(self.config.max_num_seqs, table_width)
        # One value of each, repeated on the device: as a constant, all of it would be in the program.
        shapes, one = LogitsEdits.shapes(*self._edits_size), LogitsEdits.neutral(1, 1)
        edits = jax.tree.map(lambda leaf, value: jnp.full(leaf.shape, value.flat[0], leaf.dtype), shapes, one)
        return DeviceState(self.make_pools(num_blocks), jax.tree.map(jnp.asarray, rows), edits)

    def make_pools(self, num_blocks: int) -> Pools:
        """Pools of zeros of num_blocks blocks."""
        return self._pools(num_blocks, make_pool)

    def _pools(self, num_blocks: int, make) -> Pools:
        """One pool for each place of the attention groups, or one of all places where the layers are a loop on the device.

        A pool a place needs no block tables of its own, and stays below 2**31 elements, where offsets of 32 bits reach,
        but for a small model on a large GPU; a pool of all is many times over it.
        """
        num_places = self.groups.num_places
        num_pools = 1 if self.roll_layers else num_places
        return tuple(make(self.layout, num_blocks * num_places // num_pools) for _ in range(num_pools))

    def jitted_load(self, table_width: int):
        """(rows, packed `RowLoad`) -> rows."""
        packing = RowLoad.packing(table_width)
        return jax.jit(
            lambda rows, buffer: load_rows(rows, packing.unpack(buffer)),
            donate_argnums=0,
            out_shardings=self.state_shardings.rows,
        )

    def load_arguments(self, table_width: int) -> tuple:
        """What `jitted_load` is called with, as shapes with shardings."""
        size = RowLoad.packing(table_width).size
        return self.state(2, table_width).rows, self._struct((size,), np.int32)

    def arguments(self, bucket: tuple[int, int], num_blocks: int, table_width: int) -> tuple:
        """What a bucket's step is called with: leaves, state and the packed `StepInput`, as shapes with shardings."""
        buffer = self._struct((self.packing(bucket).size,), np.int32)
        return self.abstract_leaves, self.state(num_blocks, table_width), buffer

    @property
    def result_structure(self):
        """The tree of what a step returns."""
        return jax.tree.structure((self.state(2, 1), Sampled.empty()))

    def _struct(self, shape: tuple[int, ...], dtype, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self.replicated)

    @property
    def _edits_size(self) -> tuple[int, int]:
        return min(self.config.max_num_edited_seqs, self.config.max_num_seqs) + 1, self.model.vocab_size

    @property
    def row_bytes(self) -> int:
        """Bytes on one device of the state that is kept of running sequences beside the pool."""
        state = self.state(2, self._max_table_width)
        return _bytes_on_one_device((state.rows, state.edits))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one device."""
        return _bytes_on_one_device(self.abstract_leaves)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all its places, on one device."""
        return self.layout.shard.bytes_per_block * self.groups.num_places

    @property
    def _max_table_width(self) -> int:
        return -(-self.model.max_position // self.layout.block_size) * len(self.groups.windows)

    def measure(self, bucket: tuple[int, int], num_blocks: int) -> StepMemory:
        """Compiles a bucket against pools of num_blocks blocks and reads what it needs beside weights and pool."""
        arguments = self.arguments(bucket, num_blocks, self._max_table_width)
        analysis = self.jitted(bucket).lower(*arguments).compile().memory_analysis()
        return StepMemory(
            temp=analysis.temp_size_in_bytes,
            output=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )


def _bytes_on_one_device(structs) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(structs))
