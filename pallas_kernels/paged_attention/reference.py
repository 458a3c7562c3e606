"""The specification of `ragged_paged_attention`, in numpy and float64."""

import numpy as np

from ..metadata import AttentionMetadata
from ..pool import LayerPool, logical_kv


def ragged_paged_attention_reference(
    q: np.ndarray,
    pool: LayerPool,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output `[T, H, D]` and log-sum-exp `[T, H]`, float64; a padded row is 0 and -inf. See the op for the meaning."""
    q = np.asarray(q).astype(np.float64)
    keys, values = (
        numbers if scale is None else numbers * np.asarray(scale, np.float64).reshape(-1, 1)
        for numbers, scale in zip(logical_kv(pool), (k_scale, v_scale))
    )
    seq_lens, starts, tables = (np.asarray(x) for x in (meta.seq_lens, meta.query_start_loc, meta.block_tables))
    group = q.shape[1] // pool.num_kv_heads
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for s in range(int(meta.distribution[2])):
        rows, length = slice(int(starts[s]), int(starts[s + 1])), int(seq_lens[s])
        blocks = tables[s, : -(-length // pool.block_size)]
        k, v = (
            np.repeat(x[blocks].reshape(-1, *x.shape[2:])[:length], group, axis=1) for x in (keys, values)
        )  # [U, H, D]
        scores = sm_scale * np.einsum("qhd,uhd->qhu", q[rows], k)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        at = np.arange(length - len(scores), length)[:, None]
        seen = np.arange(length) <= at
        if sliding_window is not None:
            seen &= at - np.arange(length) < sliding_window
        scores = np.where(seen[:, None], scores, -np.inf)
        v[~seen.any(axis=0)] = 0  # what nobody sees may be anything, and 0 * NaN is NaN
        if sinks is not None:
            sink = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sink], axis=2)
        top = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True)
        out[rows] = np.einsum("qhu,uhd->qhd", (weights / total)[:, :, :length], v)
        lse[rows] = (top + np.log(total))[:, :, 0]
    return out, lse
