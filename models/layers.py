"""What decoder layers are made of. Attributes bear Hugging Face's names, so a parameter's path is its name.

Named scopes say in a profile where an operation comes from; they change nothing that is compiled.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import RopeScaling

MODEL_AXIS = "model"

RopeTables = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]
"""(cos, sin) of every token's angles; the same for all layers."""


def matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"], out=jnp.float32) -> Float[Array, "T O"]:
    """x @ weight.T in the weight's dtype, accumulated in float32 and returned as `out`.

    The one form that XLA:CPU runs fast in bfloat16 (contract the last axis of both, float32 out); others are 7 to 35
    times slower, and this is as good as any on accelerators. Every matmul with a weight goes through here.
    """
    x = x.astype(weight.dtype)
    if _is_better_turned(len(x), weight):
        return jax.lax.platform_dependent(x, weight, cpu=partial(_turned, out=out), default=partial(_contract, out=out))
    return _contract(x, weight, out)


def _contract(a: Float[Array, "A I"], b: Float[Array, "B I"], out) -> Float[Array, "A B"]:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)


def _turned(x: Float[Array, "T I"], weight: Float[Array, "O I"], out) -> Float[Array, "T O"]:
    """The same product as (weight @ x.T).T; the barrier keeps XLA from turning it back."""
    return jax.lax.optimization_barrier(_contract(weight, x, out)).T


def _is_better_turned(num_rows: int, weight: Float[Array, "O I"]) -> bool:
    """Whether the CPU's library (YNNPACK) had better take the weight as its left operand.

    It packs its right operand for every call: x is small, and the weight costs as much as 20 rows of the product. Its
    tiles of the left one are whole at 16, 32 and 64 rows of bfloat16, where `_turned` is up to 2.4 times as fast; between
    them it is slower as often as not. In float32 any few rows do. A head's many outputs cost more to turn back than is won.
    """
    num_outputs, num_inputs = weight.shape
    if num_outputs > 32 * num_inputs:
        return False
    return num_rows in (16, 32, 64) if weight.dtype == jnp.bfloat16 else num_rows <= 64


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
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
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
