"""Flash-attention's inner step on a TPU: a tile of queries against a run of KV that lies in VMEM.

Scores are kept in powers of two (`log2 e` is folded into their scale), which is what the chip's exponential computes.
State is, for every row of queries, the largest score (`top`, the same in all lanes), the sum of weights (`total`,
spread over the lanes: adding registers is cheaper than adding lanes, so that is done once, at the end) and the weighted
sum of values.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..layout import LANES, PoolLayout
from .mosaic_tpu_rows import load_head

LOG2_E = math.log2(math.e)
ABSENT = -3e38  # the score of what is not seen: 2 ** (ABSENT - top) is 0 for every top there is
_NOTHING = -1e38  # the top of a row that has seen nothing


@dataclasses.dataclass(frozen=True)
class Scoring:
    """All that is static about scores."""

    layout: PoolLayout
    group: int  # query heads of a KV head
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    dtype: jnp.dtype  # of what the matrix unit multiplies
    interpret: object

    @property
    def precision(self):
        """float32 is multiplied in full: the default rounds it to bfloat16."""
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

    def scores(self, queries, keys, k_scale):
        """[rows, C], in powers of two."""
        product = jax.lax.dot_general(
            queries, keys, (((1,), (1,)), ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )
        if self.soft_cap is None:
            return product * (self.sm_scale * LOG2_E * k_scale)
        return self.soft_cap * LOG2_E * jnp.tanh(product * (self.sm_scale / self.soft_cap * k_scale))

    def weigh(self, weights, values):
        """[rows, lanes]."""
        return jax.lax.dot_general(
            weights.astype(self.dtype), values, (((1,), (0,)), ((), ())),
            precision=self.precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

    def seen(self, num_queries: int, size: int, first_position, first_kv):
        """bool [group * Q, C]: which of the KV from `first_kv` on the rows see. Rows are queries, `group` times over;
        the first query stands at `first_position`."""
        shape = self.group * num_queries, size
        kv = first_kv + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        position = first_position + (jax.lax.broadcasted_iota(jnp.int32, shape, 0) & (num_queries - 1))
        seen = kv <= position
        return seen if self.sliding_window is None else seen & (kv > position - self.sliding_window)


@dataclasses.dataclass(frozen=True)
class State:
    """Where the state of a tile's rows is kept."""

    top: object  # VMEM float32 [rows, 128]
    total: object  # VMEM float32 [rows, 128]
    weighted: object  # VMEM float32 [rows, lanes]

    def clear(self, at, sink=None):
        """Rows `at` have seen nothing, or a logit `sink` [rows, 128], in powers of two, that has no value."""
        top, weighted = self.top[at], self.weighted[at]
        self.weighted[at] = jnp.zeros(weighted.shape, jnp.float32)
        self.top[at] = jnp.full(top.shape, _NOTHING, jnp.float32) if sink is None else sink
        lane = jax.lax.broadcasted_iota(jnp.int32, top.shape, 1)
        is_counted = (lane == 0) & (sink is not None)
        self.total[at] = jnp.where(is_counted, jnp.float32(1), jnp.float32(0))

    def become_weights(self, at, scores, top_before, total):
        """Adds `scores` `[rows, C]` to the top and total of rows `at`, which were these. Returns the weights `[rows, C]`
        and what is left of older ones, `[rows, 128]`."""
        width = scores.shape[1]
        top = jnp.maximum(top_before, jnp.max(scores, axis=1, keepdims=True))
        weights, keep = jnp.exp2(scores - repeat(top, width)), jnp.exp2(top_before - top)
        self.top[at] = top
        self.total[at] = total * keep + sum(jnp.split(weights, width // LANES, axis=1))
        return weights, keep

    def result(self, at):
        """(weighted mean `[rows, lanes]`, log-sum-exp in powers of two `[rows, 128]`)."""
        total = jnp.sum(self.total[at], axis=1, keepdims=True)
        return self.weighted[at] / total, self.top[at] + jnp.log2(total)


def repeat(x, width: int):
    """`[rows, 128]`, the same in all lanes, as `[rows, width]`."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def add_stacked(state: State, queries, kv, k_scales, num_queries, first_position, first_kv, scoring: Scoring):
    """All heads at once, for a handful of queries: their rows together fill registers that one head's would not.

    queries: VMEM [K * group * Q, lanes]; kv: VMEM [C, R/pk, pk, lanes].
    """
    rows, size = scoring.group * num_queries, kv.shape[0]
    q = queries[...].astype(scoring.dtype)
    heads = [
        load_head(kv, h, scoring.layout, scoring.dtype, scoring.interpret) for h in range(scoring.layout.num_kv_heads)
    ]
    seen = scoring.seen(num_queries, size, first_position, first_kv)

    def of(x, head):
        return x[head * rows : (head + 1) * rows]

    scores = [
        jnp.where(seen, scoring.scores(of(q, h), keys, k_scales(h)), ABSENT) for h, (keys, _) in enumerate(heads)
    ]

    top, total, weighted = state.top[...], state.total[...], state.weighted[...]
    weights, keep = state.become_weights(slice(None), _stack(scores), top, total)
    more = _stack([scoring.weigh(of(weights, h), values) for h, (_, values) in enumerate(heads)])
    state.weighted[...] = weighted * repeat(keep, weighted.shape[1]) + more


def _stack(parts):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
