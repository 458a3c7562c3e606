"""of_wanted_rows: work that few rows of a step need, done for these alone in a loop on the device."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

GROUP = 8  # rows whose logits fit in a CPU's cache


def of_wanted_rows(
    compute: Callable[[Int[Array, "size"], object], object], are_wanted: Bool[Array, "R"], others, *, size: int = GROUP
):
    """others, a tree of arrays with R rows, with the wanted rows replaced by what compute(rows, done) returns of them.

    rows are the indices of size rows, where so many are not left some that nobody wants; done is others as it is so far,
    for who changes it in place. Rows that are not wanted cost nothing.
    """
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
