"""DeviceState: what stays on the devices from step to step."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jpaged.logits_edits import LogitsEdits
from jpaged.packing import Packing
from jpaged.sampling_batch import SamplingBatch
from models.types import Pools
from pallas_kernels import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """What is kept of each running sequence, by its row; one row more, the last, is of nobody and pads."""

    newest_tokens: Int[Array, "rows"]  # the token sampled last; the host may not have seen it
    block_tables: Int[Array, "rows MG"]  # entry i * G + g: group g's block of logical block i
    sampling: SamplingBatch

    @classmethod
    def initial(cls, num_rows: int, table_width: int) -> "RowState":
        """The state before any sequence runs, as numpy arrays."""
        tables = np.zeros((num_rows + 1, table_width), np.int32)
        return cls(tables[:, 0].copy(), tables, SamplingBatch.neutral(num_rows + 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Donated: a step makes the next state of it, in place."""

    pools: Pools
    rows: RowState
    edits: LogitsEdits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowLoad:
    """New content for a few rows: the sequences that are admitted. What is left over goes to the last row, neutral."""

    row_ids: Int[AnyArray, "A"]
    block_tables: Int[AnyArray, "A MG"]
    sampling: SamplingBatch

    SIZE = 8

    @classmethod
    @cache
    def packing(cls, table_width: int) -> Packing:
        return Packing(
            cls(
                jax.ShapeDtypeStruct((cls.SIZE,), np.int32),
                jax.ShapeDtypeStruct((cls.SIZE, table_width), np.int32),
                SamplingBatch.shapes(cls.SIZE),
            )
        )


def load_rows(rows: RowState, load: RowLoad) -> RowState:
    """The rows with some of them replaced."""

    def put(table, values):
        return table.at[load.row_ids].set(values)

    return RowState(
        rows.newest_tokens,
        put(rows.block_tables, load.block_tables),
        jax.tree.map(put, rows.sampling, load.sampling),
    )


def extend_tables(rows: RowState, updates: Int[Array, "U 3"]) -> RowState:
    """The rows with blocks added: (row, entry, block id) each, an entry out of range for none."""
    row, entry, block = jnp.unstack(updates, axis=1)
    tables = rows.block_tables.at[row, entry].set(block, mode="drop")
    return RowState(rows.newest_tokens, tables, rows.sampling)
