"""Packing: many small arrays in one int32 buffer, so that they reach the device in one upload."""

from math import prod

import jax
import numpy as np


class Packing:
    """Where each array of a tree lies in the buffer. template: `ShapeDtypeStruct`s of four-byte elements.

    On the host the arrays are views into the buffer, filled in place; on the device they are slices of it.
    """

    def __init__(self, template):
        leaves, self._treedef = jax.tree.flatten(template)
        ends = np.cumsum([prod(leaf.shape) for leaf in leaves]).tolist()
        self._parts = [
            (slice(begin, end), leaf.dtype, leaf.shape) for begin, end, leaf in zip([0, *ends], ends, leaves)
        ]
        self.size = ends[-1]  # elements of the buffer

    def empty(self) -> tuple[np.ndarray, object]:
        """A host buffer of zeros, and the views into it."""
        buffer = np.zeros(self.size, np.int32)
        return buffer, self.views(buffer)

    def views(self, buffer: np.ndarray):
        """The arrays in a host buffer."""
        return self._split(buffer, lambda part, dtype: part.view(dtype))

    def unpack(self, buffer: jax.Array):
        """The arrays on the device."""
        return self._split(buffer, jax.lax.bitcast_convert_type)

    def _split(self, buffer, as_dtype):
        arrays = [as_dtype(buffer[part], dtype).reshape(shape) for part, dtype, shape in self._parts]
        return jax.tree.unflatten(self._treedef, arrays)
