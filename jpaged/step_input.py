"""StepInput: what the host tells the device of one step, and what the device makes of it."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jpaged.config import MIN_TOKEN_BUCKET
from jpaged.device_state import RowState
from jpaged.packing import Packing
from models.types import ForwardBatch
from pallas_kernels import AnyArray, AttentionMetadata


def max_sequences(num_tokens: int, max_num_seqs: int) -> int:
    """S: the most sequences that a step of so many padded tokens can hold."""
    return min(num_tokens, max(max_num_seqs, MIN_TOKEN_BUCKET))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInput:
    """The sequences of the step, sorted by class, and their tokens. All int32.

    A token id below 0 stands for the newest token of row -1 - id, which the host has not seen yet. Absent sequences and
    sampling rows that pad have the row after the last.
    """

    token_ids: Int[AnyArray, "T"]
    row_ids: Int[AnyArray, "S"]  # S = max_sequences(T)
    starts: Int[AnyArray, "S"]  # the position of each sequence's first token
    query_start_loc: Int[AnyArray, "S+1"]  # and its index in the step
    distribution: Int[AnyArray, "3"]
    logits_indices: Int[AnyArray, "R"]  # the tokens whose successors are sampled
    sampled_rows: Int[AnyArray, "R"]
    limits: Int[AnyArray, "R"]  # how many tokens each may yield, where a step is several decodes
    targets: Int[AnyArray, "R"]  # the token whose log-prob a row is for, where it is not to sample one: else -1
    table_updates: Int[AnyArray, "TG 3"]  # (row, entry of its block table, block id)
    block_copies: Int[AnyArray, "SG 2"]  # (source, destination), to be made before anything is written; 0, 0 for none

    @classmethod
    @cache
    def packing(cls, num_tokens: int, num_sampled: int, max_num_seqs: int, num_groups: int) -> Packing:
        """That of program (T, R), for a model of num_groups attention groups."""
        num_seqs = max_sequences(num_tokens, max_num_seqs)
        sizes = {
            "row_ids": num_seqs, "starts": num_seqs, "query_start_loc": num_seqs + 1, "distribution": 3,
            "logits_indices": num_sampled, "sampled_rows": num_sampled, "limits": num_sampled, "targets": num_sampled,
            "token_ids": num_tokens,
        }  # fmt: skip
        flat = {name: jax.ShapeDtypeStruct((size,), np.int32) for name, size in sizes.items()}
        pairs = {"table_updates": (num_tokens * num_groups, 3), "block_copies": (num_seqs * num_groups, 2)}
        return Packing(cls(**flat, **{name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in pairs.items()}))

    def make_neutral(self, max_num_seqs: int, table_width: int) -> None:
        """Makes host arrays of zeros a step of padding alone."""
        self.row_ids.fill(max_num_seqs)
        self.sampled_rows.fill(max_num_seqs)
        self.targets.fill(-1)
        self.table_updates[:, 1] = table_width


@jax.named_scope("unpack")
def forward_batch(step: StepInput, rows: RowState, block_size: int, num_groups: int) -> ForwardBatch:
    """The model's input. Padding writes to the null block."""
    token = jnp.arange(len(step.token_ids))
    is_real = token < step.query_start_loc[step.distribution[2]]
    sequence, position = _locate(step, token)
    positions = jnp.where(is_real, position, 0)
    entries = rows.block_tables[step.row_ids]

    def of_group(group: int) -> AttentionMetadata:
        tables = entries[:, group::num_groups]
        slots = tables[sequence, positions // block_size] * block_size + positions % block_size
        return AttentionMetadata(
            seq_lens=step.starts + jnp.diff(step.query_start_loc),
            query_start_loc=step.query_start_loc,
            block_tables=tables,
            distribution=step.distribution,
            slot_mapping=jnp.where(is_real, slots, 0),
        )

    newest = rows.newest_tokens[jnp.maximum(-1 - step.token_ids, 0)]
    return ForwardBatch(
        token_ids=jnp.where(step.token_ids < 0, newest, step.token_ids),
        positions=positions,
        attention=tuple(map(of_group, range(num_groups))),
        logits_indices=step.logits_indices,
    )


def sampled_positions(step: StepInput) -> jax.Array:
    """The position in its sequence of each token that is sampled."""
    return _locate(step, step.logits_indices)[1] + 1


def _locate(step: StepInput, token) -> tuple[jax.Array, jax.Array]:
    """The sequence of some tokens of the step, and their positions in it."""
    is_past = (step.query_start_loc[1:] <= token[:, None]) & (jnp.arange(len(step.row_ids)) < step.distribution[2])
    sequence = jnp.minimum(jnp.sum(is_past, axis=1), len(step.row_ids) - 1)
    return sequence, step.starts[sequence] + token - step.query_start_loc[sequence]


def next_decode(step: StepInput, is_alive, max_num_seqs: int) -> StepInput:
    """The step in which every sequence of a step of decodes computes the token that it has just yielded.

    Token, sequence and sampling row `i` belong together, S = R. A sequence that has stopped becomes an absent one: it
    writes to the null block.
    """
    row_ids = jnp.where(is_alive, step.sampled_rows, max_num_seqs)
    starts = jnp.where(is_alive, step.starts + 1, 0)
    token_ids = step.token_ids.at[: len(row_ids)].set(-1 - row_ids)
    return replace(step, token_ids=token_ids, row_ids=row_ids, sampled_rows=row_ids, starts=starts)
