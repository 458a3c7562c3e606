"""Many small arrays in one int32 buffer, so that they reach the device in one upload.

A template is a tree of `ShapeDtypeStruct`s of four-byte elements. On the host its arrays are views into the buffer,
filled in place; on the device they are slices of it.
"""

from math import prod

import jax
import numpy as np


def packed_size(template) -> int:
    """Elements of the buffer."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(template))


def views(buffer: np.ndarray, template):
    """The template's arrays as views into a host buffer."""
    return _split(buffer, template, lambda part, dtype: part.view(dtype))


def unpack(buffer: jax.Array, template):
    """The template's arrays on the device."""
    return _split(buffer, template, jax.lax.bitcast_convert_type)


def _split(buffer, template, as_dtype):
    leaves, treedef = jax.tree.flatten(template)
    parts, begin = [], 0
    for leaf in leaves:
        end = begin + prod(leaf.shape)
        parts.append(as_dtype(buffer[begin:end], leaf.dtype).reshape(leaf.shape))
        begin = end
    return jax.tree.unflatten(treedef, parts)
