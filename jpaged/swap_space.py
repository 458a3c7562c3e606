"""SwapSpace: how much host memory preempted sequences may take, and what each of them has in it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

CHUNK = 8  # blocks that are copied at once; host memory is counted in whole chunks


@dataclass(slots=True)
class SwappedOut:
    """The KV of a preempted sequence that is in host memory: its tokens up to num_computed_tokens, from first_block on.

    The blocks before are others' too, who keep them findable. block_ids: where the blocks are copied from, and later
    to. content: the copies, for whoever made them.
    """

    first_block: int
    num_computed_tokens: int
    block_ids: list[int]
    content: Any = None

    @property
    def num_host_blocks(self) -> int:
        return -(-len(self.block_ids) // CHUNK) * CHUNK


class SwappedTable(NamedTuple):
    """A block table whose blocks are in host memory: places holds indices of the `SwappedOut`'s blocks, None for the null
    block."""

    seq: Any  # a Sequence, which holds what this module defines
    num_computed_tokens: int
    places: list[int | None]


@dataclass(slots=True)
class SwappedGroup(SwappedOut):
    """The same of several sequences that share blocks, of which one holds it: each block is there once."""

    tables: list[SwappedTable] = field(default_factory=list)

    @property
    def unfinished(self) -> list[SwappedTable]:
        return [table for table in self.tables if not table.seq.is_finished]


class SwapSpace:
    """Host memory for capacity blocks. What is in it belongs to the sequences; here it is only counted."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_used = 0

    def take(self, swapped: SwappedOut) -> bool:
        """False, and nothing taken, where it does not fit."""
        if self.num_used + swapped.num_host_blocks > self.capacity:
            return False
        self.num_used += swapped.num_host_blocks
        return True

    def give_back(self, swapped: SwappedOut) -> None:
        self.num_used -= swapped.num_host_blocks
        assert self.num_used >= 0, f"{swapped} is given back once too often"
