"""DMA of a size that is data, for the TPU kernels."""

import functools

import jax
from jax.experimental import pallas as pl


def start_copies(count, limit: int, copy):
    """Starts `copy(at, size)` for pieces that make up `count <= limit` items from 0 on.

    `copy` gives an async copy of items `[at, at + size)`, `size` static. The pieces are the bits of `count`: a
    descriptor's size is part of the program.
    """
    _for_bits(count, limit, lambda at, size: copy(at, size).start())


def wait_copies(count, limit: int, copy):
    """Waits for `count <= limit` items. A wait counts bytes: `copy` need only give copies of the same size and
    semaphore as those that were started, in whatever pieces."""
    _for_bits(count, limit, lambda at, size: copy(at, size).wait())


def _for_bits(count, limit: int, act):
    for bit in reversed(range(limit.bit_length())):
        size = 1 << bit
        at = count & ~(2 * size - 1)  # after the larger pieces
        pl.when((count & size) != 0)(functools.partial(act, at, size))


def ceil_div(x, y: int):
    """Of `x >= 0`. (`//` asks which chip it is compiled for; `lax.div` does not.)"""
    return jax.lax.div(x + (y - 1), y)
