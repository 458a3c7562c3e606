"""The shape of the KV pool on each backend: pure arithmetic, and the one place that knows it.

Logically a pool is `N` blocks of `B` slots; a slot holds one token's K and V, `[K, D]` each. Slot `s` is offset `s % B`
of block `s // B`. Block 0 is the null block: padding writes land there and nobody reads them.

The physical form follows the machine that reads it:

- **cpu**: keys `[N, K, D, B]`, values `[N, K, B, D]`. With keys transposed inside a block, scores are a plain
  `[G, D] x [D, B]` product (keys stored `[B, D]` cost half as much again, and more in other forms). bfloat16 and fp8 are
  kept as their bits in an unsigned integer, because a scatter or gather on a large array of them makes XLA:CPU convert
  all of it.
- **gpu**: `[N, B, K, 2, D]`, token-major, each head's K and then its V: one TMA box `[B, D]` brings a block's keys of a head.
- **tpu**: `[N, B, R / pk, pk, lanes]` with `pk` numbers in a 32-bit sublane. The token's `R` rows are, for `D <= 64`, one a
  head with K in lanes `0:64` and V in lanes `64:128`; otherwise two a head, K and then V, `D` rounded up to whole
  registers of 128 lanes. Of the shapes tried this is the one that XLA:TPU keeps row-major, unpadded and uncopied. Rows
  are rounded up to `pk` in each shard.

Under tensor parallelism every shard holds `num_kv_heads / num_shards` neighbouring heads and their rows.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

Form = Literal["cpu", "gpu", "tpu"]
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
LANES = 128  # of a TPU's vector register
HALF_LANES = LANES // 2
_CPU_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The shape of a pool, all but its number of blocks. `num_kv_heads` counts all shards; `block_size` counts slots.

    Raises `ValueError` for a size below 1, a form or dtype that no pool can have, or heads that the shards cannot
    share out evenly.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: Literal["float32", "bfloat16", "int8", "float8_e4m3fn"]
    form: Form = "cpu"
    num_shards: int = 1

    def __post_init__(self):
        for name in ("num_kv_heads", "head_dim", "block_size", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"pool dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.form not in ("cpu", "gpu", "tpu"):
            raise ValueError(f"pool form must be cpu, gpu or tpu, got {self.form!r}")
        if self.num_kv_heads % self.num_shards:
            raise ValueError(f"num_shards must divide num_kv_heads = {self.num_kv_heads}, got {self.num_shards}")

    @property
    def storage_dtype(self) -> np.dtype:
        """The dtype that the arrays have."""
        return jnp.dtype(_CPU_STORAGE.get(self.dtype, self.dtype) if self.form == "cpu" else self.dtype)

    @property
    def is_quantised(self) -> bool:
        """Whether numbers are stored divided by a scale."""
        return self.dtype in ("int8", "float8_e4m3fn")

    @property
    def largest(self) -> float:
        """The largest number that a quantised pool stores; larger ones saturate."""
        return {"int8": 127.0, "float8_e4m3fn": 448.0}[self.dtype]

    @property
    def shard(self) -> "PoolLayout":
        """What one device holds."""
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // self.num_shards, num_shards=1)

    def kv_heads_of(self, shard: int) -> range:
        """The KV heads whose rows shard number `shard` owns."""
        count = self.num_kv_heads // self.num_shards
        return range(shard * count, (shard + 1) * count)

    # What follows down to `packing` is only of the tpu form.

    @property
    def packs_kv(self) -> bool:
        """Whether a row of lanes holds a head's K and V together."""
        return self.head_dim <= HALF_LANES

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return LANES if self.packs_kv else -(-self.head_dim // LANES) * LANES

    @property
    def packing(self) -> int:
        """Numbers in one 32-bit sublane."""
        return 4 // self.storage_dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows of one token in one shard, without padding."""
        return (1 if self.packs_kv else 2) * self.shard.num_kv_heads

    @property
    def padded_rows(self) -> int:
        """Rows of one token in one shard, with padding to whole sublanes."""
        return -(-self.rows // self.packing) * self.packing

    def shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a pool's arrays, over all shards: keys and values on CPU, elsewhere one array of both."""
        lead, heads, dim, size = num_blocks, self.num_kv_heads, self.head_dim, self.block_size
        if self.form == "cpu":
            return (lead, heads, dim, size), (lead, heads, size, dim)
        if self.form == "gpu":
            return ((lead, size, heads, 2, dim),)
        return ((lead, size, self.num_shards * self.padded_rows // self.packing, self.packing, self.lanes),)

    @property
    def sharded_axis(self) -> int:
        """The axis of every array over which shards lie."""
        return 1 if self.form == "cpu" else 2

    def partition_spec(self, axis: str | None) -> PartitionSpec:
        """Shards KV heads over mesh axis `axis`. One spec stands for every array of the pool."""
        return PartitionSpec(*[None] * self.sharded_axis, axis)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of one layer, K and V and padding, over all shards."""
        return sum(math.prod(shape) for shape in self.shapes(1)) * self.storage_dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in one layer, padding included, over all shards."""
        return self.bytes_per_block // self.block_size

    @property
    def padding_bytes_per_token(self) -> int:
        """Bytes of `bytes_per_token` that hold nothing."""
        return self.bytes_per_token - 2 * self.num_kv_heads * self.head_dim * self.storage_dtype.itemsize
