"""What an attention op is told about a step."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Int

AnyArray = jax.Array | np.ndarray  # a step is made of numpy arrays on the host; jit turns them into the device's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens belong to which sequence, and where their KV lives. All int32.

    Only `T` follows the step's bucket; `S` and `M` are fixed for an engine's life: no kernel's work grows with them.
    Sequences are sorted by class, and their tokens lie in the same order in the flat step without gaps: with
    `distribution = (a, b, c)`, sequences `[0, a)` decode (one token each, so token `i` is sequence `i`), `[a, b)`
    verify (a few tokens), `[b, c)` prefill or mix, and `[c, S)` are absent. Nothing is read of absent sequences, except
    that `query_start_loc[c]` is the number of real tokens. Present ones have at least one token. Entries of a block
    table past its sequence's last block are not followed.
    """

    seq_lens: Int[AnyArray, "S"]  # KV length, this step's tokens included
    query_start_loc: Int[AnyArray, "S+1"]  # the first token of each sequence in the flat step
    block_tables: Int[AnyArray, "S M"]
    distribution: Int[AnyArray, "3"]
    slot_mapping: Int[AnyArray, "T"]  # block_id * block_size + offset; a slot of the null block for padding

    def at_block(self, first_block, block_size: int) -> "AttentionMetadata":
        """The same step in a pool whose blocks 0, 1, 2 ... lie at first_block and after it."""
        return dataclasses.replace(
            self,
            block_tables=self.block_tables + first_block,
            slot_mapping=self.slot_mapping + first_block * block_size,
        )
