"""Rows of numbers in a TPU's VMEM: from 32-bit words to keys, values and queries, and back.

What lies in VMEM is `[..., pk, lanes]`, the pool's form: `pk` rows share the sublanes of 32-bit words. Read as such,
one row would take a register of its own; read as words (a bitcast of the reference, which moves nothing), 8 tokens
fill one register, and shifts take a row out of each word. The interpreter knows no bitcast of a reference: under `interpret`
the same words are put together from the numbers.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..layout import LANES, PoolLayout

_HIGH = -(2**16)  # the upper half of a word


def words_of(ref):
    """A reference `[..., pk, lanes]` as 32-bit words `[rows, 128]`; the pieces of a row, of 128 lanes, are neighbours."""
    words = ref if ref.dtype.itemsize == 4 else ref.bitcast(jnp.int32)
    return words.reshape(words.size // LANES, LANES)


def load_words(ref, row: int | jax.Array, interpret):
    """int32 `[C, lanes]`: the words of row group `row` of every token of `ref` `[C, R/pk, pk, lanes]`."""
    count, groups, packing, lanes = ref.shape
    if interpret:
        bits = jax.lax.bitcast_convert_type(ref[:, row], jnp.dtype(f"uint{32 // packing}")).astype(jnp.uint32)
        word = sum(bits[:, i] << (32 // packing * i) for i in range(packing))
        return jax.lax.bitcast_convert_type(word, jnp.int32)
    words, pieces = words_of(ref), lanes // LANES
    found = [words[_at(row * pieces + i, count, groups * pieces)] for i in range(pieces)]
    return _as_int32(found[0] if pieces == 1 else jnp.concatenate(found, axis=1))


def _at(start, count, step):
    return pl.ds(start, count) if step == 1 else pl.ds(start, count, step)


def _as_int32(x):
    return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)


def zero_tokens(ref, begin, end, interpret):
    """Stores zeros over tokens `[begin, end)` of `ref` `[C, R/pk, pk, lanes]`, in every row."""
    if interpret:
        token = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        ref[...] = jnp.where((token >= begin) & (token < end), jnp.zeros((), ref.dtype), ref[...])
        return
    words, per_token = words_of(ref), ref.shape[1] * ref.shape[3] // LANES
    size = 64  # words rows at a time: enough stores to hide the loop, few enough for a short tail
    begin, end = begin * per_token, end * per_token

    def chunk(index, _):
        at = pl.ds(pl.multiple_of(index * size, size), size)
        row = index * size + jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
        words[at] = jnp.where((row >= begin) & (row < end), jnp.zeros((), words.dtype), words[at])
        return 0

    jax.lax.fori_loop(jax.lax.div(begin, size), jax.lax.div(end + (size - 1), size), chunk, 0)


def _unpack(word, index, dtype, to):
    """Row number `index` of those of `dtype` that share a word, as `to`."""
    if dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(word, jnp.float32).astype(to)
    if dtype.itemsize == 2:
        if not (isinstance(index, int) and index == 1):
            word = word << (16 - 16 * index)
        high = word if isinstance(index, int) and index == 0 else word & jnp.int32(_HIGH)
        return jax.lax.bitcast_convert_type(high, jnp.float32).astype(to)  # exact: a bfloat16 is a float32's top half
    top = word << (24 - 8 * index)
    if dtype == jnp.int8:
        return (top >> 24).astype(jnp.float32).astype(to)
    return _fp8_to_float32(top).astype(to)


def _fp8_to_float32(top):
    """float8_e4m3fn from the highest byte of a word, by its bits: most chips have no such number, and Mosaic's own
    conversion wants another arrangement of registers. A subnormal comes out of a normal number, for the chip has none.
    """
    magnitude = jax.lax.shift_right_logical(top, 4) & jnp.int32(0x7F << 20)
    normal = jax.lax.bitcast_convert_type(magnitude + jnp.int32(120 << 23), jnp.float32)
    value = jnp.where(magnitude < (1 << 23), 2 * normal - 2.0**-6, normal)
    value = jnp.where(magnitude == (0x7F << 20), jnp.float32(jnp.nan), value)
    sign = top & jnp.int32(-(2**31))
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(value, jnp.int32) | sign, jnp.float32)


def load_head(ref, head: int | jax.Array, layout: PoolLayout, to, interpret):
    """Keys and values `[C, lanes]` of a KV head as `to`, of the tokens of `ref` `[C, R/pk, pk, lanes]`.

    Where a row holds K and V together both are that row: a query with zeros against V finds K, and of a sum of rows
    only V's lanes are used. So nothing need be moved between lanes.
    """
    unpack = functools.partial(_unpack, dtype=layout.storage_dtype, to=to)
    if layout.packs_kv:
        both = unpack(load_words(ref, _div(head, layout.packing), interpret), _rem(head, layout.packing))
        return both, both
    if layout.packing == 1:
        return tuple(unpack(load_words(ref, 2 * head + i, interpret), 0) for i in range(2))
    heads = layout.packing // 2  # in a word
    word = load_words(ref, _div(head, heads), interpret)
    first = 2 * _rem(head, heads) if heads > 1 else 0
    return tuple(unpack(word, first + i) for i in range(2))


def _div(x, y: int):
    return x // y if isinstance(x, int) else jax.lax.div(x, y)


def _rem(x, y: int):
    return x % y if isinstance(x, int) else jax.lax.rem(x, y)


def load_group(ref, index, interpret):
    """The `pq` rows that share a word, float32 `[C, lanes]` each, of tokens `ref` `[C, H/pq, pq, lanes]`."""
    word = load_words(ref, index, interpret)
    return [_unpack(word, i, ref.dtype, jnp.float32) for i in range(ref.shape[2])]


def store_group(ref, index, rows, interpret):
    """The inverse of `load_group`: rounds to `ref`'s dtype."""
    count, groups, packing, lanes = ref.shape
    rows = [row.astype(ref.dtype) for row in rows]
    if interpret:
        ref[:, index] = jnp.stack(rows, axis=1)
        return
    words, pieces = words_of(ref), lanes // LANES
    if packing == 2:
        low, high = (jax.lax.bitcast_convert_type(row.astype(jnp.float32), jnp.int32) for row in rows)
        rows = [jax.lax.shift_right_logical(low, 16) | high]
    for i in range(pieces):
        at = _at(index * pieces + i, count, groups * pieces)
        words[at] = rows[0][:, i * LANES : (i + 1) * LANES]


def load_token(ref, interpret):
    """All rows `[H, lanes]` of the one token of `ref` `[1, H/pq, pq, lanes]`, in its dtype."""
    _, groups, packing, lanes = ref.shape
    if interpret:
        return ref[0].reshape(groups * packing, lanes)
    words, pieces = words_of(ref), lanes // LANES
    found = [words[_at(i, groups, pieces)] for i in range(pieces)]
    found = found[0] if pieces == 1 else jnp.concatenate(found, axis=1)
    return found if packing == 1 else pltpu.bitcast(found, ref.dtype)


def store_token(ref, rows, interpret):
    """The inverse of `load_token`: rounds to `ref`'s dtype."""
    _, groups, packing, lanes = ref.shape
    rows = rows.astype(ref.dtype)
    if interpret:
        ref[0] = rows.reshape(groups, packing, lanes)
        return
    words, pieces = words_of(ref), lanes // LANES
    if packing == 2:
        rows = pltpu.bitcast(rows, jnp.int32)
    for i in range(pieces):
        words[_at(i, groups, pieces)] = rows[:, i * LANES : (i + 1) * LANES]
