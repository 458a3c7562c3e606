"""The steps that the kernels are measured on: shapes, pools full of numbers, block tables, and what must be moved."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionMetadata, LayerPool, PoolLayout, pool_struct
from pallas_kernels.pool import quantise

KV_SCALE = 0.04  # of a quantised pool's numbers


@dataclasses.dataclass(frozen=True)
class Heads:
    """A model's attention."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


LLAMA_8B = Heads("Llama 8B", 32, 8, 128)
SMOLLM2 = Heads("SmolLM2", 9, 3, 64)


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` sequences of `context` tokens, the last `queries` of which this step computes: 1 is decode."""

    heads: Heads
    batch: int
    context: int
    queries: int = 1
    dtype: str = "bfloat16"  # of the pool
    with_xla: bool = False  # XLA is measured too, where it is not the best there is
    with_moves: bool = False  # so are kv_write and copy_blocks

    @property
    def query_class(self) -> str:
        return "decode" if self.queries == 1 else "prefill"

    @property
    def name(self) -> str:
        shape = f"{self.batch} x {self.context}"
        if self.queries > 1:
            shape = f"{self.batch} x {self.queries} of {self.context}"
        return f"{self.query_class} {shape}, {self.heads.model}, {self.dtype}"

    @property
    def kv_bytes(self) -> int:
        """K and V of every sequence, without the layout's padding."""
        return (
            2
            * self.heads.num_kv_heads
            * self.heads.head_dim
            * jnp.dtype(self.dtype).itemsize
            * self.batch
            * self.context
        )

    @property
    def needed_bytes(self) -> int:
        """The least that can be moved: K and V once, queries and outputs in bfloat16."""
        return self.kv_bytes + 2 * 2 * self.batch * self.queries * self.heads.num_heads * self.heads.head_dim

    @property
    def flops(self) -> int:
        """Of both products, over the positions that the causal mask leaves."""
        seen = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.heads.num_heads * self.heads.head_dim * self.batch * seen

    def layout(self, form: str, block_size: int) -> PoolLayout:
        return PoolLayout(self.heads.num_kv_heads, self.heads.head_dim, block_size, self.dtype, form)

    def blocks(self, block_size: int) -> int:
        """Of one layer, the null block included."""
        return 1 + self.batch * -(-self.context // block_size)


def make_metadata(case: Case, block_size: int, limits: tuple[int, int], *, is_random: bool) -> AttentionMetadata:
    """The step with its blocks one after the other, or scattered over the layer.

    limits: sequences and tokens a sequence that the engine would allow; its tables are wider than the step needs.
    """
    held = -(-case.context // block_size)
    max_sequences, width = max(limits[0], case.batch), max(limits[1] // block_size, held)
    ids = 1 + np.arange(case.batch * held, dtype=np.int32)
    if is_random:
        ids = np.random.default_rng(0).permutation(ids)
    tables = np.zeros((max_sequences, width), np.int32)
    tables[: case.batch, :held] = ids.reshape(case.batch, held)
    lens = np.zeros(max_sequences, np.int32)
    lens[: case.batch] = case.context
    at = np.arange(case.context - case.queries, case.context)
    slots = tables[: case.batch, at // block_size] * block_size + at % block_size
    decoding = case.batch if case.queries == 1 else 0
    meta = AttentionMetadata(
        seq_lens=lens,
        query_start_loc=(case.queries * np.minimum(np.arange(max_sequences + 1), case.batch)).astype(np.int32),
        block_tables=tables,
        distribution=np.array([decoding, decoding, case.batch], np.int32),
        slot_mapping=slots.reshape(-1).astype(np.int32),
    )
    return jax.device_put(meta)


def make_queries(case: Case) -> jax.Array:
    shape = case.batch * case.queries, case.heads.num_heads, case.heads.head_dim
    return jax.random.normal(jax.random.key(1, impl="rbg"), shape, jnp.bfloat16)


def make_new_kv(case: Case) -> tuple[jax.Array, jax.Array]:
    """K and V of the step's tokens."""
    shape = 2, case.batch * case.queries, case.heads.num_kv_heads, case.heads.head_dim
    return tuple(jax.random.normal(jax.random.key(2, impl="rbg"), shape, jnp.bfloat16))


def scales_of(case: Case) -> dict[str, jax.Array]:
    if jnp.dtype(case.dtype).itemsize > 1:
        return {}
    return {"k_scale": jnp.float32(KV_SCALE), "v_scale": jnp.float32(KV_SCALE)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def full_pool(layout: PoolLayout, num_blocks: int) -> LayerPool:
    """A pool of random numbers, their mean square 1: zeros would be faster to multiply."""
    struct = pool_struct(layout, num_blocks)
    most = math.sqrt(3) / (KV_SCALE if layout.is_quantised else 1)
    key = jax.random.key(0, impl="rbg")  # one operation where the default is a thousand for the compiler

    def fill(leaf):
        return quantise(jax.random.uniform(key, leaf.shape, jnp.bfloat16, -most, most), None, layout)

    return LayerPool(tuple(map(fill, struct.arrays)), layout)
