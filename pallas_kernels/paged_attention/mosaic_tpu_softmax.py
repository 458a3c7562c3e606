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
_ABSENT = -3e38  # the score of what is not seen: 2 ** (_ABSENT - top) is 0 for every top there is
_NOTHING = -1e38  # the top of a row that has seen nothing
_PART = 128  # rows whose scores are in registers at a time; 256 took 470 cycles where 128 take 330 (v6e's schedule)


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

    def add(self, parts, scores, weigh):
        """Adds `scores[i]` `[rows, C]` to rows `parts[i]`; `weigh(weights)` gives the weighted sum of their values.

        Parts do not wait for each other: step by step over all of them, one's products hide another's exponentials. All
        state is read before any is written, or the compiler would have to keep that order.
        """
        width = scores[0].shape[1]
        old = [(self.top[at], self.total[at], self.weighted[at]) for at in parts]
        tops = [jnp.maximum(o, jnp.max(s, axis=1, keepdims=True)) for (o, _, _), s in zip(old, scores)]
        weights = [jnp.exp2(s - _repeat(top, width)) for s, top in zip(scores, tops)]
        sums = [weigh(w) for w in weights]
        for at, (top_before, total, weighted), top, w, more in zip(parts, old, tops, weights, sums):
            keep = jnp.exp2(top_before - top)
            self.top[at] = top
            self.total[at] = total * keep + sum(jnp.split(w, width // LANES, axis=1))
            self.weighted[at] = weighted * _repeat(keep, weighted.shape[1]) + more

    def result(self, at):
        """(weighted mean `[rows, lanes]`, log-sum-exp in powers of two `[rows, 128]`)."""
        total = jnp.sum(self.total[at], axis=1, keepdims=True)
        return self.weighted[at] / total, self.top[at] + jnp.log2(total)


def _repeat(x, width: int):
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
        jnp.where(seen, scoring.scores(of(q, h), keys, k_scales(h)), _ABSENT) for h, (keys, _) in enumerate(heads)
    ]

    def weigh(weights):
        return _stack([scoring.weigh(of(weights, h), values) for h, (_, values) in enumerate(heads)])

    state.add([slice(None)], [_stack(scores)], weigh)


def _stack(parts):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def add_by_head(state: State, queries, kv, k_scales, strip, num_strips, first_position, end_strip, first_kv, scoring):
    """Head by head and strip by strip of queries, for many of them; strips that see none of the KV are left out.

    queries: VMEM [K * num_strips * group * strip, lanes]; kv: VMEM [C, R/pk, pk, lanes]. Of a head's `num_strips` strips
    of `strip` queries the first `end_strip` are there.
    """
    rows, size = scoring.group * strip, kv.shape[0]
    first_strip = jax.lax.div(jnp.maximum(first_kv - first_position, 0), strip)
    heads = max(n for n in range(1, scoring.group + 1) if scoring.group % n == 0 and (n == 1 or n * strip <= _PART))
    part = min(_PART, heads * strip)

    def head(h, _):
        keys, values = load_head(kv, h, scoring.layout, scoring.dtype, scoring.interpret)

        def one_strip(index, _):
            first = first_position + index * strip
            start = (h * num_strips + index) * rows
            parts = [pl.ds(pl.multiple_of(start + at, part), part) for at in range(0, rows, part)]

            def add(is_masked):
                scores = [scoring.scores(queries[at], keys, k_scales(h)) for at in parts]
                if is_masked:
                    seen = scoring.seen(strip, size, first, first_kv)
                    scores = [jnp.where(seen[i * part : (i + 1) * part], s, _ABSENT) for i, s in enumerate(scores)]
                state.add(parts, scores, lambda weights: scoring.weigh(weights, values))

            sees_all = first_kv + size - 1 <= first
            if scoring.sliding_window is not None:
                sees_all &= first_kv > first + (strip - 1) - scoring.sliding_window
            pl.when(sees_all)(lambda: add(False))
            pl.when(jnp.logical_not(sees_all))(lambda: add(True))
            return 0

        return jax.lax.fori_loop(first_strip, end_strip, one_strip, 0)

    jax.lax.fori_loop(0, scoring.layout.num_kv_heads, head, 0)
