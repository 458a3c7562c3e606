"""prefill_batch: whole sequences as one step of the model, outside of any engine."""

import itertools

import numpy as np

from models.types import ForwardBatch
from pallas_kernels import AttentionMetadata


def prefill_batch(sequences: list[list[int]], block_size: int, num_groups: int = 1) -> tuple[ForwardBatch, int]:
    """A step in an empty pool, and how many blocks that needs: sequences lie one after the other from block 1, those of
    the next attention group after them.

    Its logits are of each sequence's last token.
    """
    lens = np.array([len(ids) for ids in sequences], np.int32)
    num_blocks = -(-lens // block_size)
    ends = 1 + np.cumsum(num_blocks)
    tables = np.zeros((len(lens), num_blocks.max()), np.int32)
    for table, count, end in zip(tables, num_blocks, ends):
        table[:count] = np.arange(end - count, end)
    positions = np.concatenate([np.arange(length) for length in lens]).astype(np.int32)
    sequence = np.repeat(np.arange(len(lens)), lens)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    meta = AttentionMetadata(
        seq_lens=lens,
        query_start_loc=starts,
        block_tables=tables,
        distribution=np.array([0, 0, len(lens)], np.int32),
        slot_mapping=tables[sequence, positions // block_size] * block_size + positions % block_size,
    )
    num_each = int(num_blocks.sum())
    of_groups = tuple(meta.at_block(group * num_each, block_size) for group in range(num_groups))
    token_ids = np.fromiter(itertools.chain.from_iterable(sequences), np.int32)
    return ForwardBatch(token_ids, positions, of_groups, starts[1:] - 1), 1 + num_groups * num_each
