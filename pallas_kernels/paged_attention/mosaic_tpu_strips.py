"""How prefill multiplies on a TPU: head by head, strip by strip of queries, three strips under way at a time.

A result of the matrix unit is some 130 cycles away, and so is the largest score of a row. One strip after the other
would wait for both. So while one strip is multiplied with keys, the one before becomes weights and the one before that is
multiplied with values, whatever heads and KV they belong to. Each of the three takes strips in the same order, so no sum
changes.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .mosaic_tpu_rows import load_head
from .mosaic_tpu_softmax import ABSENT, Scoring, State, repeat

# Heads whose values are kept: when a head begins, strips of the two before may still be under way. No more, for each head
# has a strip at least: KV that no query of the tile sees is not brought.
_SLOTS = 3


class Stages(NamedTuple):
    """What strips that are under way hold in VMEM."""

    keys: object  # [C, lanes], of the head that is multiplied
    values: object  # [_SLOTS, C, lanes], of the last heads
    scores: object  # float32 [group * strip, C], of the strip that is to become weights
    weights: object  # [group * strip, C], of the strip that is to be weighed
    keep: object  # float32 [group * strip, 128], what is left of its old sums

    @staticmethod
    def shapes(vmem, rows: int, size: int, lanes: int, dtype) -> "Stages":
        """For strips of `rows` rows and `size` positions; `vmem(shape, dtype)` makes each."""
        return Stages(
            keys=vmem((size, lanes), dtype),
            values=vmem((_SLOTS, size, lanes), dtype),
            scores=vmem((rows, size), jnp.float32),
            weights=vmem((rows, size), dtype),
            keep=vmem((rows, 128), jnp.float32),
        )


class UnderWay(NamedTuple):
    """Scalars: where the rows of the two strips begin that are not done yet, and where their values are kept."""

    scored: jax.Array
    scored_slot: jax.Array
    weighed: jax.Array
    weighed_slot: jax.Array
    slot: jax.Array  # for the next head


@dataclasses.dataclass(frozen=True)
class Strips:
    """A tile of queries, `[K * num_strips * group * strip, lanes]` in VMEM, by rows. `state` has a strip of rows more."""

    state: State
    queries: object
    stages: Stages
    scoring: Scoring
    strip: int  # queries
    num_strips: int  # of a head

    @property
    def rows(self) -> int:
        return self.scoring.group * self.strip

    @property
    def nothing(self) -> UnderWay:
        """No strip is under way: what is done of such goes to the rows that nobody reads."""
        zero = jnp.int32(0)
        nowhere = jnp.int32(self.scoring.layout.num_kv_heads * self.num_strips * self.rows)
        return UnderWay(nowhere, zero, nowhere, zero, zero)

    def add(self, kv, k_scales, first_position, end_strip, first_kv, under_way: UnderWay) -> UnderWay:
        """Takes KV `[C, R/pk, pk, lanes]` from position `first_kv` on; the first query stands at `first_position`. Of a
        head's strips the first `end_strip` are there; those that see none of the KV are left out."""
        scoring, size = self.scoring, kv.shape[0]
        first_strip = jax.lax.div(jnp.maximum(first_kv - first_position, 0), self.strip)

        def head(h, under_way: UnderWay):
            slot = under_way.slot
            loaded = load_head(kv, h, scoring.layout, scoring.dtype, scoring.interpret)
            self.stages.keys[...], self.stages.values[slot] = loaded

            def one_strip(index, under_way: UnderWay):
                first, start = first_position + index * self.strip, (h * self.num_strips + index) * self.rows
                step = functools.partial(self._step, start, under_way, k_scales(h))
                sees_all = first_kv + size - 1 <= first
                if scoring.sliding_window is not None:
                    sees_all &= first_kv > first + (self.strip - 1) - scoring.sliding_window
                pl.when(sees_all)(step)
                pl.when(jnp.logical_not(sees_all))(lambda: step(scoring.seen(self.strip, size, first, first_kv)))
                return UnderWay(start, slot, under_way.scored, under_way.scored_slot, under_way.slot)

            under_way = jax.lax.fori_loop(first_strip, end_strip, one_strip, under_way)
            return under_way._replace(slot=jax.lax.rem(slot + 1, _SLOTS))

        return jax.lax.fori_loop(0, scoring.layout.num_kv_heads, head, under_way)

    def finish(self, under_way: UnderWay):
        """Takes the strips that are under way to their end."""

        def drain(_, under_way: UnderWay):
            self._step(jnp.int32(0), under_way, jnp.float32(0))  # scores that become nothing
            return self.nothing._replace(weighed=under_way.scored, weighed_slot=under_way.scored_slot)

        jax.lax.fori_loop(0, 2, drain, under_way)

    def _step(self, start, under_way: UnderWay, k_scale, seen=None):
        """One step of three strips: rows from `start` on are multiplied with keys, of which they see `seen`."""
        state, stages, scoring = self.state, self.stages, self.scoring
        multiplied, scored, weighed = (
            pl.ds(pl.multiple_of(x, self.rows), self.rows) for x in (start, under_way.scored, under_way.weighed)
        )
        # All is read before any is written, or the compiler would have to keep another order.
        keys, values = stages.keys[...], stages.values[under_way.weighed_slot]
        scores, weights, keep = stages.scores[...], stages.weights[...], stages.keep[...]
        top, total, weighted = state.top[scored], state.total[scored], state.weighted[weighed]

        product = scoring.scores(self.queries[multiplied], keys, k_scale)
        if seen is not None:
            product = jnp.where(seen, product, ABSENT)
        state.weighted[weighed] = weighted * repeat(keep, weighted.shape[1]) + scoring.weigh(weights, values)
        new_weights, stages.keep[...] = state.become_weights(scored, scores, top, total)
        stages.weights[...] = new_weights.astype(scoring.dtype)
        stages.scores[...] = product
