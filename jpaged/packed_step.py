"""PackedStep: all host inputs of one step in one int32 buffer, so that a step costs one upload.

On the host the step's arrays are views into the buffer, filled in place; on the device they are slices of it.
"""

from dataclasses import dataclass
from math import prod

import jax
import numpy as np

from jpaged.sampling_batch import SamplingBatch
from models.types import ForwardBatch
from pallas_kernels import AttentionMetadata


@dataclass(frozen=True)
class PackedStep:
    """The shapes of one program's inputs: T, R, S and M. Every array has four-byte elements."""

    num_tokens: int
    num_rows: int
    num_seqs: int
    max_blocks: int

    def _template(self) -> tuple[ForwardBatch, SamplingBatch]:
        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, np.int32)

        batch = ForwardBatch(
            token_ids=ints(self.num_tokens),
            positions=ints(self.num_tokens),
            attention=AttentionMetadata(
                seq_lens=ints(self.num_seqs),
                query_start_loc=ints(self.num_seqs + 1),
                block_tables=ints(self.num_seqs, self.max_blocks),
                distribution=ints(3),
                slot_mapping=ints(self.num_tokens),
            ),
            logits_indices=ints(self.num_rows),
        )
        return batch, SamplingBatch.shapes(self.num_rows)

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(self._template()))

    def empty(self) -> tuple[np.ndarray, ForwardBatch, SamplingBatch]:
        """A buffer and the views into it: a step of padding alone, with nothing to attend to and nobody to sample for."""
        buffer = np.zeros(self.size, np.int32)
        batch, sampling = self._split(buffer, lambda part, dtype: part.view(dtype))
        sampling.make_neutral()
        return buffer, batch, sampling

    @jax.named_scope("unpack")
    def unpack(self, buffer: jax.Array) -> tuple[ForwardBatch, SamplingBatch]:
        """The step's arrays on the device."""
        return self._split(buffer, jax.lax.bitcast_convert_type)

    def _split(self, buffer, as_dtype):
        leaves, treedef = jax.tree.flatten(self._template())
        parts, begin = [], 0
        for leaf in leaves:
            end = begin + prod(leaf.shape)
            parts.append(as_dtype(buffer[begin:end], leaf.dtype).reshape(leaf.shape))
            begin = end
        return jax.tree.unflatten(treedef, parts)
