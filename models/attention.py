"""Self-attention over the paged pool."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from models.layers import MODEL_AXIS, Linear, RopeTables, apply_rope, largest
from pallas_kernels import AttentionMetadata, LayerPool, PoolLayout, kv_write, ragged_paged_attention


class Attention(nnx.Module):
    """The projections of grouped-query attention; what lies between them is `paged_attention`."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, partial_sums: jnp.dtype):
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.embed_dim, q_dim, dtype=dtype, shard="column")
        self.k_proj = Linear(config.embed_dim, kv_dim, dtype=dtype, shard="column")
        self.v_proj = Linear(config.embed_dim, kv_dim, dtype=dtype, shard="column")
        self.o_proj = Linear(q_dim, config.embed_dim, dtype=dtype, shard="row", partial_sums=partial_sums)
        self.head_dim = config.head_dim

    @jax.named_scope("qkv")
    def project(self, x: Float[Array, "T E"], rope: RopeTables):
        """(q [T, H, D], k [T, K, D], v [T, K, D]), rotated to their positions; q in the weights' dtype, as any input of
        a matmul, k and v as they are: the pool rounds them."""

        def heads(y: Float[Array, "T HD"]) -> Float[Array, "T heads D"]:
            return y.reshape(y.shape[0], -1, self.head_dim)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return apply_rope(q, rope).astype(self.q_proj.weight.dtype), apply_rope(k, rope), v

    @jax.named_scope("attention_output")
    def output(self, attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        return self.o_proj(attended.reshape(attended.shape[0], -1))


_OF_SCALES = P(None, MODEL_AXIS)


def _named(scales: Float[Array, "2 K"] | None) -> dict[str, Array]:
    return {} if scales is None else {"k_scale": scales[0], "v_scale": scales[1]}


def _attend(window: int | None, implementation: str | None, q, pool, meta, scales) -> Float[Array, "T H D"]:
    return ragged_paged_attention(
        q, pool, meta,
        sm_scale=q.shape[-1] ** -0.5, sliding_window=window, implementation=implementation, **_named(scales),
    )  # fmt: skip


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pool: LayerPool,
    meta: AttentionMetadata,
    scales: Float[Array, "2 K"] | None,
    kind: Int[Array, ""] | None = None,
    *,
    windows: tuple[int | None, ...] = (None,),
    mesh: Mesh,
    layout: PoolLayout,
    implementation: str | None,
) -> tuple[Float[Array, "T H D"], LayerPool]:
    """Writes this step's K and V into the pool, then attends to all of it. A quantised pool has scales, of K and of V.

    Each token sees the last `windows[kind]` tokens of its sequence, all where that is None; a single window needs no
    kind. Each device of the mesh owns its share of the KV heads, their query heads and their part of the pool, so
    neither needs communication.
    """

    def local(q, k, v, pool, meta, scales, kind):
        with jax.named_scope("kv_write"):
            pool = kv_write(pool, k, v, meta.slot_mapping, **_named(scales))
        with jax.named_scope("attention"):
            kinds = [partial(_attend, window, implementation) for window in windows]
            attended = (
                kinds[0](q, pool, meta, scales) if kind is None else lax.switch(kind, kinds, q, pool, meta, scales)
            )
        return attended, pool

    by_head, by_kv_head = P(None, MODEL_AXIS, None), layout.partition_spec(MODEL_AXIS)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, by_kv_head, P(), _OF_SCALES, P()),
        out_specs=(by_head, by_kv_head),
        check_vma=False,
    )(q, k, v, pool, meta, scales, kind)


def attention_difference(
    q: Float[Array, "T H D"],
    pool: LayerPool,
    meta: AttentionMetadata,
    scales: Float[Array, "2 K"] | None,
    *,
    window: int | None,
    mesh: Mesh,
    layout: PoolLayout,
    implementation: str | None,
) -> Float[Array, ""]:
    """How far an implementation is from plain XLA, as a share of the largest output; the pool is only read."""

    def local(q, pool, meta, scales):
        outputs = (_attend(window, name, q, pool, meta, scales) for name in (implementation, "xla"))
        got, expected = (x.astype(jnp.float32) for x in outputs)
        worst, most = largest(jnp.abs(got - expected)), jnp.max(jnp.abs(expected))
        return jax.lax.pmax(worst, MODEL_AXIS) / jnp.maximum(jax.lax.pmax(most, MODEL_AXIS), 1e-6)

    specs = P(None, MODEL_AXIS, None), layout.partition_spec(MODEL_AXIS), P(), _OF_SCALES
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(q, pool, meta, scales)
