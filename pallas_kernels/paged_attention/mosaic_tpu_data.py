"""What the TPU kernel of `ragged_paged_attention` is given, and what its loops hold."""

import dataclasses
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from .mosaic_tpu_softmax import Scoring

TABLE_ROWS = 4  # block tables in SMEM: the producer's and those of the next sequences


class Refs(NamedTuple):
    """What the kernel is given. HBM is not touched but by DMA."""

    seq_lens: object  # SMEM int32 [S]
    starts: object  # SMEM int32 [S + 1]
    distribution: object  # SMEM int32 [3]
    scales: object  # SMEM float32 [2, K]: of keys and of values
    tables: object  # HBM int32 [S, 1, M]
    q: object  # HBM [T, H / pq, pq, lanes], H rounded up
    pool: object  # HBM [N, B, R / pk, pk, lanes]
    sinks: object  # VMEM float32 [H, 128], in powers of two, the same in all lanes; or None
    out: object  # HBM, as q
    lse: object  # HBM float32 [T, H, 1, 128], the same in all lanes; or None
    table: object  # SMEM int32 [TABLE_ROWS, 1, M]
    kv: object  # VMEM [buffers, fetch, R / pk, pk, lanes]
    producer: object  # SMEM int32 [4]: sequence, tile, fetch (-1 for the tile's first), number of fetches so far
    in_flight: object  # SMEM int32 [2]: tokens of each result on their way out
    table_sem: object  # DMA [TABLE_ROWS]
    kv_sem: object  # DMA [buffers]
    q_sem: object  # DMA [2]
    out_sem: object  # DMA [2]


@dataclasses.dataclass(frozen=True)
class Loop:
    """What is static about the loop over one class of sequences.

    Inside it rows are in the order [KV head, strip, head of the group, query of the strip].
    """

    scoring: Scoring
    tile_q: int  # queries
    strip: int  # queries multiplied at a time
    tile_kv: int  # positions multiplied at a time
    is_stacked: bool  # all heads at a time
    is_contiguous: bool  # the blocks of a sequence follow the first of its table: to measure what looking them up costs

    @property
    def num_strips(self) -> int:
        return self.tile_q // self.strip

    @property
    def num_heads(self) -> int:
        return self.scoring.layout.num_kv_heads * self.scoring.group

    def rows_of(self, head, strip):
        """Where the rows of a head's strip are."""
        group = self.scoring.group
        start = (jax.lax.div(head, group) * self.num_strips + strip) * group + jax.lax.rem(head, group)
        return pl.ds(pl.multiple_of(start * self.strip, self.strip), self.strip)


class Buffers(NamedTuple):
    """What a loop holds in VMEM beside KV."""

    q: object  # [2, tile_q, H / pq, pq, lanes]
    out: object  # [2, tile_q, H / pq, pq, lanes]
    lse: object  # float32 [2, tile_q, H, 1, 128]; or None
    rows: object  # [H * tile_q, lanes]: the queries in the order of rows
    top: object  # float32 [H * tile_q, 128]; one strip more where `stages` are
    total: object  # float32, as top
    weighted: object  # float32 [..., lanes], as top
    stages: object  # of strips under way; None where heads are stacked


class Tile(NamedTuple):
    """A tile of queries: scalars."""

    token: jax.Array  # its first, in the flat step
    count: jax.Array  # of queries
    position: jax.Array  # of its first query
    begin: jax.Array  # the KV that it sees is [begin, end)
    end: jax.Array
    is_last: jax.Array  # of its sequence
