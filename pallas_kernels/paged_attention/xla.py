"""`ragged_paged_attention` in plain XLA ops, shaped for XLA:CPU.

Decode and verify take (token, partition) pairs in groups; prefill takes tiles of queries of one sequence, partition by
partition. Both are loops whose trip counts are data: work is exact, and nothing is padded to S or M. A verified token
is computed just as a decoded one, so a draft that is accepted has changed no bit; that costs its blocks a gather
for each token (they are in cache by then), where tiles of 8 queries were as slow and compiled a third loop.

A partition is reduced by itself to (shift, total, weighted), flash-attention's (m, l, acc) (Dao et al., 2022), except
that the shift is an integer and weights are powers of two: `2 ** (score - shift)`. To merge two partitions is then to
scale by an exact power of two, so the result depends on the order of partitions, which is always theirs by position,
and not on how a loop happened to group them. Within a partition values are added up block by block in both loops:
a token's output is the same to the bit whether it is decoded, verified or part of a prompt.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..metadata import AttentionMetadata
from ..pool import LayerPool, read_blocks
from .tile_table import tuned
from .tiles import Tiles, default_tiles

_LOG2_E = math.log2(math.e)
_MIN_RUN = 16  # positions; for fewer the CPU's library adds up a decoded token's products in another order than a prompt's
_LOWEST = -(2**24)  # the shift of nothing; a score this low is as good as absent


class _Partial(NamedTuple):
    """Softmax numerators over some positions: `sum 2**(s - shift)` and the same weighted by V."""

    shift: jax.Array  # int32[...]
    total: jax.Array  # float32[...]
    weighted: jax.Array  # float32[..., D]


class _Scoring(NamedTuple):
    """What turns q.k into a score, in powers of two."""

    soft_cap: float | None
    window: int | None

    def first_seen(self, position):
        """The first KV position that a query at `position` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)

    def __call__(self, product):
        if self.soft_cap is None:
            return product
        cap = self.soft_cap * _LOG2_E
        return cap * jnp.tanh(product / cap)


def ragged_paged_attention_xla(
    q,
    pool: LayerPool,
    meta: AttentionMetadata,
    *,
    sm_scale,
    sliding_window,
    soft_cap,
    sinks,
    k_scale,
    v_scale,
    return_lse,
    tiles=None,
):
    """See `ragged_paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    if not isinstance(tiles, Tiles):
        tiles = tuned(default_tiles(pool.block_size, num_tokens), "xla", pool.shard, num_heads // pool.num_kv_heads)
    if tiles.partition % pool.block_size:
        raise ValueError(f"tiles.partition must be a multiple of block_size = {pool.block_size}, got {tiles.partition}")
    scoring = _Scoring(soft_cap, sliding_window)
    # [T, K, G, D], in float32 and in powers of two from here on
    grouped = (q.astype(jnp.float32) * (sm_scale * _LOG2_E)).reshape(num_tokens, pool.num_kv_heads, -1, head_dim)
    if k_scale is not None:
        grouped = grouped * k_scale.reshape(-1, 1, 1)
    state = _decode(grouped, pool, meta, scoring, tiles)
    state = _prefill(state, grouped, pool, meta, scoring, tiles)
    out, lse = _finish(state, sinks, num_real=meta.query_start_loc[meta.distribution[2]])
    if v_scale is not None:
        out = out * v_scale.reshape(-1, 1, 1)
    out = out.reshape(q.shape).astype(q.dtype)
    return (out, lse.reshape(num_tokens, num_heads)) if return_lse else out


def _decode(q, pool, meta, scoring, tiles) -> _Partial:
    """Partials of every token, those of the decode and verify ranges filled in."""
    num_tokens, max_blocks = len(q), meta.block_tables.shape[1]
    per_partition = tiles.partition // pool.block_size
    sequence, lens = _decode_rows(meta, num_tokens)
    last = -(-lens // tiles.partition)
    ends = jnp.cumsum(last - scoring.first_seen(lens - 1) // tiles.partition)  # in the list of all pairs
    last = last - ends  # a pair's partition is this plus its index
    num_all = ends[-1]

    def group(num_pairs, carry):
        begin, state = carry
        span = min(num_pairs, num_tokens)  # the pairs of a group belong to at most this many neighbouring tokens
        pair = begin + jnp.arange(num_pairs)
        row = jnp.minimum(jnp.sum(ends[None, :] <= pair[:, None], axis=1), num_tokens - 1)
        length = jnp.where(pair < num_all, lens[row], 0)
        block = (last[row] + pair)[:, None] * per_partition + jnp.arange(per_partition)
        held = block * pool.block_size < length[:, None]
        ids = jnp.where(held, meta.block_tables[sequence[row][:, None], jnp.clip(block, 0, max_blocks - 1)], 0)
        position = block[:, :1] * pool.block_size + jnp.arange(tiles.partition)  # [P, C]
        seen = (position < length[:, None]) & (position >= scoring.first_seen(length - 1)[:, None])
        partial = _pair_partials(q[row], pool, ids, seen, scoring)
        start = jnp.minimum(row[0], num_tokens - span)
        member = (row == start + jnp.arange(span)[:, None]) & (pair < num_all)  # [span, P]
        local = jnp.minimum(row - start, span - 1)  # an idle lane adds nothing to a row that exists
        return begin + num_pairs, _merge_pairs(state, partial, start, local, member)

    carry = 0, _Partial(jnp.full(q.shape[:3], _LOWEST), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape))
    if tiles.few_pairs < tiles.pairs:
        many = functools.partial(group, tiles.pairs)
        carry = jax.lax.while_loop(lambda carry: carry[0] + tiles.few_pairs < num_all, many, carry)
    few = functools.partial(group, min(tiles.few_pairs, tiles.pairs))
    return jax.lax.while_loop(lambda carry: carry[0] < num_all, few, carry)[1]


def _decode_rows(meta, num_tokens):
    """The sequence of each decoded or verified token, and how much KV it sees (0 for other tokens)."""
    num_sequences, (_, end, _) = len(meta.seq_lens), meta.distribution
    token = jnp.arange(num_tokens)
    is_past = (meta.query_start_loc[1:] <= token[:, None]) & (jnp.arange(num_sequences) < end)
    sequence = jnp.minimum(jnp.sum(is_past, axis=1), num_sequences - 1)
    to_come = meta.query_start_loc[sequence + 1] - 1 - token
    return sequence, jnp.where(token < meta.query_start_loc[end], meta.seq_lens[sequence] - to_come, 0)


def _pair_partials(q, pool, ids, seen, scoring) -> _Partial:
    """Partials `[P, K, G]` of pairs: q `[P, K, G, D]`, block ids `[P, C/B]`, seen `[P, C]`."""
    keys, values = _read_runs(pool, ids)
    num_pairs, num_runs, *_, run = keys.shape
    seen = seen.reshape(num_pairs, num_runs, run)
    values = jnp.where(seen[:, :, None, :, None], values, 0)  # 0 * NaN is NaN
    q = jnp.broadcast_to(q[:, None], (num_pairs, num_runs, *q.shape[1:]))
    scores = scoring(jnp.einsum("pckgd,pckdb->pckgb", q, keys))
    seen = seen[:, :, None, None, :]
    shift = _shift(jnp.max(jnp.where(seen, scores, _LOWEST), axis=(1, 4)))
    weights = jnp.where(seen, jnp.exp2(scores - shift[:, None, :, :, None]), 0)
    weighted = jnp.einsum("pckgb,pckbd->pckgd", weights, values)
    return _Partial(shift, _sum_last(_sum(jnp.unstack(weights, axis=1))), _sum(jnp.unstack(weighted, axis=1)))


def _read_runs(pool, ids):
    """Keys `[..., n, K, D, run]` and values `[..., n, K, run, D]` of blocks `ids` `[..., C/B]`: a run is a block, or as
    many small ones as make `_MIN_RUN` positions."""
    keys, values = read_blocks(pool, ids)  # [..., C/B, K, D, B] and [..., C/B, K, B, D]
    *lead, num_blocks, num_kv_heads, head_dim, size = keys.shape
    if size >= _MIN_RUN or _MIN_RUN % size:
        return keys, values
    blocks = *lead, num_blocks * size // _MIN_RUN, _MIN_RUN // size, num_kv_heads
    runs = *lead, num_blocks * size // _MIN_RUN, num_kv_heads
    keys = jnp.moveaxis(keys.reshape(*blocks, head_dim, size), -4, -2).reshape(*runs, head_dim, _MIN_RUN)
    values = jnp.moveaxis(values.reshape(*blocks, size, head_dim), -4, -3).reshape(*runs, _MIN_RUN, head_dim)
    return keys, values


def _merge_pairs(state, partial, start, local, member) -> _Partial:
    """Adds pairs to rows `[start, start + span)` of the state; pair `p` belongs to row `start + local[p]`."""
    span = len(member)
    old = _Partial(*(jax.lax.dynamic_slice_in_dim(x, start, span) for x in state))
    of_rows = jnp.max(jnp.where(member[:, :, None, None], partial.shift, _LOWEST), axis=1)
    shift = jnp.maximum(old.shift, of_rows)
    scale = _power_of_two(partial.shift - shift[local])
    keep = _power_of_two(old.shift - shift)
    total = _add_at(old.total * keep, local, partial.total * scale)
    weighted = _add_at(old.weighted * keep[..., None], local, partial.weighted * scale[..., None])
    new = _Partial(shift, total, weighted)
    return _Partial(*(jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(state, new)))


def _prefill(state, q, pool, meta, scoring, tiles) -> _Partial:
    """The state with the tokens of the prefill range filled in, in tiles of queries of one sequence."""
    rows = min(tiles.prefill_rows, len(q))
    _, first_sequence, end_sequence = meta.distribution

    def tile(carry):
        sequence, done, state = carry
        token, length = meta.query_start_loc[sequence] + done, meta.seq_lens[sequence]
        end = meta.query_start_loc[sequence + 1]
        start = jnp.minimum(token, len(q) - rows)  # the last tile may reach back over rows that are not its own
        index = start + jnp.arange(rows)
        mine = (index >= token) & (index < end)
        at = length - end + index  # positions of the tile's queries
        new = _tile_partial(
            jax.lax.dynamic_slice_in_dim(q, start, rows), pool, meta.block_tables[sequence], at,
            length - end + token, jnp.minimum(length, length - end + token + rows), scoring, tiles.partition,
        )  # fmt: skip

        def put(x, y):
            old = jax.lax.dynamic_slice_in_dim(x, start, rows)
            y = jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), y, old)
            return jax.lax.dynamic_update_slice_in_dim(x, y, start, 0)

        is_last = token + rows >= end
        return (
            jnp.where(is_last, sequence + 1, sequence),
            jnp.where(is_last, 0, done + rows),
            _Partial(*map(put, state, new)),
        )

    return jax.lax.while_loop(lambda carry: carry[0] < end_sequence, tile, (first_sequence, 0, state))[2]


def _tile_partial(q, pool, table, at, first_at, end_at, scoring, size) -> _Partial:
    """Partials `[R, K, G]` of one tile: q `[R, K, G, D]` at positions `at` `[R]`, `[first_at, end_at)` of them real."""
    per_partition = size // pool.block_size
    num_rows, num_kv_heads, group, head_dim = q.shape
    q = q.transpose(1, 0, 2, 3).reshape(num_kv_heads, num_rows * group, head_dim)
    at = jnp.repeat(at, group)[:, None]  # [R*G, 1]

    def partition(carry):
        index, old = carry
        block = index * per_partition + jnp.arange(per_partition)
        ids = jnp.where(block * pool.block_size < end_at, table[jnp.minimum(block, len(table) - 1)], 0)
        position = index * size + jnp.arange(size)
        keys, values = _read_runs(pool, ids)
        num_runs, run = len(keys), keys.shape[-1]
        keys = keys.transpose(1, 2, 0, 3).reshape(num_kv_heads, head_dim, size)
        is_seen = (position < end_at) & (position >= scoring.first_seen(first_at))  # by anyone: 0 * NaN is NaN
        values = jnp.where(is_seen.reshape(num_runs, 1, run, 1), values, 0)
        seen = (position <= at) & (position >= scoring.first_seen(at))  # [R*G, C]
        scores = scoring(jnp.einsum("krd,kdc->krc", q, keys))
        own = _shift(jnp.max(jnp.where(seen, scores, _LOWEST), axis=2))
        weights = jnp.where(seen, jnp.exp2(scores - own[:, :, None]), 0)
        shift = jnp.maximum(old.shift, own)
        keep, scale = _power_of_two(old.shift - shift), _power_of_two(own - shift)
        of_runs = jnp.split(weights, num_runs, axis=2)  # and added up as in `_pair_partials`
        total = old.total * keep + _sum_last(_sum(of_runs)) * scale
        weighted = _sum(jnp.einsum("krb,kbd->krd", w, v) for w, v in zip(of_runs, values))
        return index + 1, _Partial(shift, total, old.weighted * keep[..., None] + weighted * scale[..., None])

    rows = (num_kv_heads, num_rows * group)
    nothing = _Partial(jnp.full(rows, _LOWEST), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    first = scoring.first_seen(first_at) // size
    done = jax.lax.while_loop(lambda carry: carry[0] * size < end_at, partition, (first, nothing))[1]
    return _Partial(*(jnp.moveaxis(x.reshape(num_kv_heads, num_rows, group, *x.shape[2:]), 0, 1) for x in done))


def _finish(state, sinks, num_real):
    """Output `[T, K, G, D]` and natural log-sum-exp `[T, K, G]`."""
    shift, total, weighted = state
    if sinks is not None:
        sink = (sinks.astype(jnp.float32) * _LOG2_E).reshape(shift.shape[1:])
        new = jnp.maximum(shift, _shift(sink))
        keep = _power_of_two(shift - new)
        total, weighted = total * keep + jnp.exp2(sink - new), weighted * keep[..., None]
        shift = new
    is_real = (jnp.arange(len(shift)) < num_real)[:, None, None]
    out = jnp.where(is_real[..., None], weighted / total[..., None], 0)
    return out, jnp.where(is_real, (shift + jnp.log2(total)) / _LOG2_E, -jnp.inf)


def _add_at(x, rows, y):
    """`x` with `y[i]` added to row `rows[i]`, in the order of `i`, which a product with a 0/1 matrix does not keep."""
    return x.at[rows].add(y, indices_are_sorted=True, mode="promise_in_bounds")


def _sum(terms):
    return functools.reduce(operator.add, terms)


def _sum_last(x):
    """The sum over the last axis, in an order that depends on its length alone.

    XLA:CPU hands a reduction to YNNPACK or not by its size in all, so a row's `x.sum` changes with its neighbours.
    Halving keeps the innermost loops wide; the barrier keeps XLA from fusing them into one tree of scalar loads.
    """
    while (length := x.shape[-1]) > 1:
        x = jax.lax.optimization_barrier(_sum(jnp.split(x, 2 if length % 2 == 0 else length, axis=-1)))
    return x[..., 0]


def _shift(top):
    return jnp.ceil(jnp.maximum(top, _LOWEST)).astype(jnp.int32)


def _power_of_two(exponent):
    """Exactly `2.0 ** exponent` for int32 `exponent <= 0`; 0 where that is below every normal float32."""
    bits = (jnp.maximum(exponent, -127) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
