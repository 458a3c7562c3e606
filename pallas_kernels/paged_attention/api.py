"""The op `ragged_paged_attention`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dispatch import call_implementation, lazily, loaded
from ..layout import Form
from ..metadata import AttentionMetadata
from ..pool import LayerPool
from .reference import ragged_paged_attention_reference
from .tiles import Tiles, TpuTiles
from .tiles_gpu import GpuTiles
from .xla import ragged_paged_attention_xla


def _reference(q, pool, meta, *, sinks, k_scale, v_scale, return_lse, tiles, **static):
    def on_host(q, pool, meta, sinks, k_scale, v_scale):
        out, lse = ragged_paged_attention_reference(
            q, pool, meta, sinks=sinks, k_scale=k_scale, v_scale=v_scale, **static
        )
        return out.astype(q.dtype), lse.astype("float32")

    struct = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    out, lse = jax.pure_callback(on_host, struct, q, pool, meta, sinks, k_scale, v_scale)
    return (out, lse) if return_lse else out


_IMPLEMENTATIONS = {
    "mosaic_gpu": lazily(".paged_attention.mosaic_gpu", "ragged_paged_attention_mosaic_gpu"),
    "mosaic_tpu": lazily(".paged_attention.mosaic_tpu", "ragged_paged_attention_mosaic_tpu"),
    "xla": ragged_paged_attention_xla,
    "reference": _reference,
}
_DEFAULT = {"cpu": ("xla",), "gpu": ("mosaic_gpu", "xla"), "tpu": ("mosaic_tpu", "xla")}


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    pool: LayerPool,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    return_lse: bool = False,
    tiles: Tiles | TpuTiles | GpuTiles | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H D"] | tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Causal attention of every token of the step over its own sequence's KV, this step's tokens included.

    Query `i` of a sequence stands at position `seq_len - query_len + i` and sees the positions up to its own, the last
    `sliding_window` of them where given. Scores are `sm_scale * q.k`, then `soft_cap * tanh(score / soft_cap)`; `sinks`
    holds one more logit a head that takes part in the softmax and has no value. Stored keys and values are multiplied
    by `k_scale` and `v_scale` (scalars or `[K]`, None for 1). Accumulates in float32, returns `q`'s dtype. A padded
    row's output is 0. With `return_lse` also the natural log of the softmax's denominator, float32, the sink included,
    -inf for a padded row.

    On XLA:CPU a row's float32 result is the same to the bit alone or in any batch, in any chunking of a prefill, and
    verified or decoded; decode sums in the same partitions as prefill, but by other products, and agrees to rounding.

    `tiles` and `implementation` ("mosaic_gpu", "mosaic_tpu", "xla", "reference", or None for the best of this pool's
    form) are static. Tiles are of one implementation; every other takes its own default.
    Raises `ValueError` for shapes that do not fit, `NotImplementedError` where no implementation can.
    """
    num_heads, head_dim = q.shape[1:]
    if head_dim != pool.head_dim or num_heads % pool.num_kv_heads:
        raise ValueError(
            f"q must be [T, H, D] with D = {pool.head_dim} and H a multiple of K = {pool.num_kv_heads}, got {q.shape}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}")
    return call_implementation(
        _IMPLEMENTATIONS, _DEFAULT, implementation, pool.shard.form, q, pool, meta,
        sm_scale=sm_scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, tiles=tiles,
    )  # fmt: skip


def attention_implementations(form: Form) -> dict[str, Callable]:
    """What may serve a pool of this form, best first: for measurements and tests, which ask one of them in particular."""
    return {name: loaded(_IMPLEMENTATIONS[name]) for name in _DEFAULT[form]}
