"""Work that few rows of a step need, done for these alone in a loop on the device."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_GROUP = 8  # rows whose logits fit in a CPU's cache

Compute = Callable[[Int[Array, "size"], object], object]
"""(indices of rows, the results so far) -> results of these rows. Some may be rows that nobody wants."""


def some_at_a_time(compute: Compute, are_wanted: Bool[Array, "R"], others, *, size: int = _GROUP):
    """others, a tree of arrays with R rows, with the wanted rows replaced by what compute returns of them, size rows at a
    time. Rows that are not wanted cost nothing; what compute reads of the results so far is changed in place."""
    num_rows, num_wanted = len(are_wanted), jnp.sum(are_wanted)
    order = jnp.argsort(~are_wanted)

    def group(carry):
        begin, done = carry
        index = begin + jnp.arange(min(size, num_rows))
        rows = order[jnp.minimum(index, num_rows - 1)]
        targets = jnp.where(index < num_wanted, rows, num_rows + index)  # out of range: dropped

        def put(x, y):
            return x.at[targets].set(y, mode="drop", unique_indices=True)

        return begin + size, jax.tree.map(put, done, compute(rows, done))

    return jax.lax.while_loop(lambda carry: carry[0] < num_wanted, group, (0, others))[1]


def of_wanted_rows(compute: Compute, are_wanted: Bool[Array, "R"], others):
    """The same; on a CPU some at a time, so that their logits stay in its cache, elsewhere all at once, where there are any."""
    some = partial(some_at_a_time, compute)
    every = partial(some, size=len(are_wanted))
    return jax.lax.platform_dependent(are_wanted, others, cpu=some, default=every)
