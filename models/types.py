"""ForwardBatch and Pools: the device inputs of one step, and the state that it carries on."""

from dataclasses import dataclass

import jax
from jaxtyping import Int

from pallas_kernels import AnyArray, AttentionMetadata, LayerPool

Pools = tuple[LayerPool, ...]
"""A model's KV: one pool a place of `AttentionGroups`, or one pool of all places one after the other."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """A flat, ragged, padded step. Tokens of one sequence are adjacent, in order of position.

    Padding tokens have position 0 and write to the null block; padding logits_indices point at token 0.
    """

    token_ids: Int[AnyArray, "T"]
    positions: Int[AnyArray, "T"]
    attention: tuple[AttentionMetadata, ...]  # of each group: they differ in tables and slots
    logits_indices: Int[AnyArray, "R"]  # the token rows whose next token is sampled
