"""The work-lists of the Hopper kernels, made on the device by plain XLA ops.

They depend on nothing but the step, so XLA computes them once for all layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowTiles(NamedTuple):
    """Runs of neighbouring queries of one sequence, in the order of the flat step. Entries past `count` are junk."""

    count: jax.Array  # int32[]
    sequence: jax.Array  # int32[W]
    token: jax.Array  # int32[W], the first one
    tokens: jax.Array  # int32[W]
    position: jax.Array  # int32[W], of the first one in its sequence


class Partitions(NamedTuple):
    """Runs of KV of each row tile: the items of split-K. Those of a tile are neighbours, ordered by position."""

    count: jax.Array  # int32[]
    tile: jax.Array  # int32[W]
    begin: jax.Array  # int32[W], KV positions
    end: jax.Array  # int32[W]
    first: jax.Array  # int32[tiles], the first item of each tile
    last: jax.Array  # int32[tiles], one past its last item


def row_tiles(meta, begin, end, num_tokens: int, size: int) -> RowTiles:
    """Tiles of at most `size` queries of sequences `[begin, end)`: as many as a step of `num_tokens` can have."""
    num_sequences = len(meta.seq_lens)
    index = jnp.arange(num_sequences)
    lens = meta.query_start_loc[1:] - meta.query_start_loc[:-1]
    ends = jnp.cumsum(jnp.where((index >= begin) & (index < end), -(-lens // size), 0))
    tile = jnp.arange(min(num_tokens, num_sequences + num_tokens // size))
    sequence = _owner(ends, tile)
    done = (tile - jnp.where(sequence > 0, ends[sequence - 1], 0)) * size
    return RowTiles(
        count=ends[-1],
        sequence=sequence,
        token=meta.query_start_loc[sequence] + done,
        tokens=jnp.clip(lens[sequence] - done, 0, size),
        position=meta.seq_lens[sequence] - lens[sequence] + done,
    )


def first_seen(position: jax.Array, window: int | None) -> jax.Array:
    """The first KV position that a query at `position` sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def partitions(tiles: RowTiles, window: int | None, size: int, capacity: int) -> Partitions:
    """Cuts each tile's KV at multiples of `size`, or of the smallest `size * 2**n` that makes at most `capacity` items.

    `capacity` must be at least the number of tiles: with one item each, everything fits.
    """
    present = jnp.arange(len(tiles.tokens)) < tiles.count
    seen_from = first_seen(tiles.position, window)
    seen_to = tiles.position + tiles.tokens

    def cut(length):
        begin = seen_from // length
        return begin, jnp.where(present, -(-seen_to // length) - begin, 0)

    lengths = [size << n for n in range(8)] + [2**30]
    fits = jnp.stack([jnp.sum(cut(length)[1]) <= capacity for length in lengths])
    length = jnp.asarray(lengths, jnp.int32)[jnp.argmax(fits)]
    begin, count = cut(length)
    last = jnp.cumsum(count)
    item = jnp.arange(capacity)
    tile = _owner(last, item)
    start = (begin[tile] + item - (last - count)[tile]) * length
    return Partitions(
        count=last[-1],
        tile=tile,
        begin=jnp.maximum(start, seen_from[tile]),
        end=jnp.minimum(start + length, seen_to[tile]),
        first=last - count,
        last=last,
    )


def _owner(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The run that each index falls in, by where the runs end; the last run for indices past all."""
    found = jnp.searchsorted(ends, index, side="right", method="scan_unrolled")
    return jnp.minimum(found, len(ends) - 1).astype(jnp.int32)
