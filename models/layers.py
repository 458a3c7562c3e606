"""What decoder layers are made of. Attributes bear Hugging Face's names, so a parameter's path is its name.

Named scopes say in a profile where an operation comes from; they change nothing that is compiled.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from models.config import RopeScaling

MODEL_AXIS = "model"
_SUMMED_IN_ONE = 1024  # inputs: XLA:CPU's library adds up more in parts, but not with a narrow right operand
_MIN_REDUCED = 4096  # numbers: XLA:CPU reduces fewer by itself, in another order than its library does

RopeTables = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]
"""(cos, sin) of every token's angles; the same for all layers."""


def matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"], out=jnp.float32) -> Float[Array, "T O"]:
    """x @ weight.T in the weight's dtype, accumulated in float32 and returned as `out`.

    The one form that XLA:CPU runs fast in bfloat16 (contract the last axis of both, float32 out); others are 7 to 35
    times slower, and this is as good as any on accelerators. Every matmul with a weight goes through here.
    """
    x = x.astype(weight.dtype)
    num_rows = _rows_when_turned(len(x), weight)
    if num_rows is None:
        return _contract(x, weight, out)
    turned = partial(_turned, num_rows=num_rows, out=out)
    return jax.lax.platform_dependent(x, weight, cpu=turned, default=partial(_contract, out=out))


def _contract(a: Float[Array, "A I"], b: Float[Array, "B I"], out) -> Float[Array, "A B"]:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)


def _turned(x: Float[Array, "T I"], weight: Float[Array, "O I"], num_rows: int, out) -> Float[Array, "T O"]:
    """The same product as (weight @ x.T).T, x padded to num_rows.

    The barrier keeps XLA from turning it back; the layout has it write T rows of O, or all that follows goes by columns.
    """
    padded = jnp.pad(x, ((0, num_rows - len(x)), (0, 0)))
    product = jax.lax.optimization_barrier(_contract(weight, padded, out)).T
    return with_layout_constraint(product, Layout(major_to_minor=(0, 1)))[: len(x)]


def _rows_when_turned(num_rows: int, weight: Float[Array, "O I"]) -> int | None:
    """How many rows x is best padded to with the weight as the left operand of the CPU's library; None: as the right one.

    The library (YNNPACK) packs its right operand for every call: x is small, and the weight costs as much as 20 rows of
    the product. But it computes whole tiles of x, 16 or 32 rows; of few, up to a third more than there are still take less
    time. A head's many outputs cost more to turn back than is won, and many rows hide the packing. In bfloat16 a row's
    product is the same to the bit in every form that this chooses: hence the limit on inputs, which costs 3 % of a step.
    """
    num_outputs, num_inputs = weight.shape
    if num_outputs > 32 * num_inputs or num_rows > 128:
        return None
    if weight.dtype != jnp.bfloat16 and num_rows <= 16:
        return num_rows  # its tiles are smaller, and packing the weight costs more
    tile = 16 if num_rows <= 16 else 32
    padded = -(-num_rows // tile) * tile
    if num_inputs > _SUMMED_IN_ONE and padded < 64:
        return None
    most = num_rows // 3 if num_rows <= 32 else 0
    return padded if padded - num_rows <= most else None


def sum_alone(x: Float[Array, "T *rest"], axis: int) -> Float[Array, "T *left"]:
    """The sum over one of the axes after the first, in an order that T does not change: a row's sum is its own, to the bit.

    XLA:CPU hands a reduction to its library or not by its size in all: rows of zeros make it large enough.
    """
    num_rows, num_each = len(x), math.prod(x.shape[1:])
    if num_rows * num_each < _MIN_REDUCED:
        num_more = -(-_MIN_REDUCED // num_each) - num_rows
        x = jax.lax.optimization_barrier(jnp.pad(x, ((0, num_more), *((0, 0),) * (x.ndim - 1))))  # else XLA drops them
    return jnp.sum(x, axis=axis)[:num_rows]


def largest(x: Float[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """The maximum, in which NaN counts as infinity. In `jnp.max` XLA:CPU's library leaves NaN out, where the array is large."""
    return jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=axis)


class Linear(nnx.Module):
    """weight is [out, in], as in checkpoints. Sharded over its outputs (column) or its inputs (row).

    `partial_sums` is the dtype in which a row-sharded result leaves its device to be added to the others'.
    """

    def __init__(self, in_dim: int, out_dim: int, *, dtype: jnp.dtype, shard: str, partial_sums=jnp.float32):
        spec = {"column": (MODEL_AXIS, None), "row": (None, MODEL_AXIS)}[shard]
        self.weight = nnx.Param(jnp.zeros((out_dim, in_dim), dtype), out_sharding=spec)
        self.partial_sums = partial_sums

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        return matmul(x, self.weight[...], self.partial_sums)


class Embed(nnx.Module):
    """Token embedding, sharded over the vocabulary; `attend` is the tied output head."""

    def __init__(self, vocab_size: int, embed_dim: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((vocab_size, embed_dim), dtype), out_sharding=(MODEL_AXIS, None))

    @jax.named_scope("embed")
    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T E"]:
        return self.weight[...][token_ids].astype(jnp.float32)

    def attend(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        return matmul(x, self.weight[...])


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        scale = jax.lax.rsqrt(sum_alone(jnp.square(x), axis=1)[:, None] / x.shape[1] + self.eps)
        return x * scale * self.weight[...].astype(jnp.float32)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). Gate and up stay separate matrices: fused ones compile badly on TPU."""

    def __init__(self, embed_dim: int, mlp_dim: int, *, dtype: jnp.dtype, partial_sums: jnp.dtype):
        self.gate_proj = Linear(embed_dim, mlp_dim, dtype=dtype, shard="column")
        self.up_proj = Linear(embed_dim, mlp_dim, dtype=dtype, shard="column")
        self.down_proj = Linear(mlp_dim, embed_dim, dtype=dtype, shard="row", partial_sums=partial_sums)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, "half"]:
    """Radians per position of each rotated pair, in float32 (Llama 3's scaling where given)."""
    freqs = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freqs
    wavelength = 2 * math.pi / freqs
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
    return jnp.where(wavelength > low, freqs / scaling.factor, jnp.where(wavelength < high, freqs, blended))


@jax.named_scope("rope")
def rope_tables(positions: Int[Array, "T"], head_dim: int, theta: float, scaling: RopeScaling | None) -> RopeTables:
    """Computed once a step, from the tokens' positions."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(head_dim, theta, scaling)
    return jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]


@jax.named_scope("rope")
def apply_rope(x: Float[Array, "T heads D"], rope: RopeTables) -> Float[Array, "T heads D"]:
    """Rotates the pairs (i, i + D/2), the half-rotation layout of Hugging Face checkpoints."""
    cos, sin = rope
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
