"""PinnedBlocks: the blocks that an operator's prefixes own for good."""

from jpaged.block_pool import Block, BlockPool
from jpaged.block_table import BlockTable
from jpaged.prefix_cache import BlockHash, PrefixCache, root_hash
from jpaged.sequence import Sequence


class PinnedBlocks:
    """A prefix's full blocks are found in the cache like others'. A partly filled last block is found here: whoever goes on
    from it copies it at its first write.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache):
        self._pool, self._cache = pool, prefix_cache
        self.tables: list[BlockTable] = []
        self._tails: dict[
            BlockHash, list[tuple[list[int], list[Block]]]
        ] = {}  # by what comes before: tokens and entries

    @property
    def blocks(self) -> set[Block]:
        return {block for table in self.tables for block in table.blocks}

    @property
    def num_filled(self) -> dict[Block, int]:
        """The slots filled of each partly filled block."""
        return {block: len(t) for tails in self._tails.values() for t, entries in tails for block in entries}

    def hold_tail(self, seq: Sequence) -> BlockTable:
        """A prefix's table, of which it has the partly filled last block of what seq has computed, if there is one."""
        table, num_groups = BlockTable(), len(self._cache.spec.windows)
        if seq.num_computed_tokens % self._cache.block_size:
            self._own(table, seq.block_table.blocks[-num_groups:])
        self.tables.append(table)
        return table

    def pin(self, table: BlockTable, token_ids: list[int]) -> None:
        """Completes the table of a prefix that has been computed: owns its full blocks, and makes the last one findable."""
        hashes: list[BlockHash] = []
        num_blocks = len(token_ids) // self._cache.block_size
        self._cache.extend_hashes(hashes, token_ids, num_blocks)
        tail, table.blocks = table.blocks, []
        self._own(table, [block for block in self._cache.match(hashes, num_blocks) if block is not None])
        if tail:
            tokens = token_ids[num_blocks * self._cache.block_size :]
            self._tails.setdefault(hashes[-1] if hashes else root_hash(), []).append((tokens, tail))
            table.blocks += tail

    def unpin(self, table: BlockTable) -> None:
        """Gives up one that could not be computed."""
        self.tables.remove(table)
        self._pool.release(table.blocks[::-1])

    def tail_after(self, before: BlockHash, token_ids: list[int]) -> tuple[list[Block], int]:
        """The entries of the longest partly filled block that goes on from a full one with these tokens, and how many."""
        fitting = [(len(t), entries) for t, entries in self._tails.get(before, ()) if t == token_ids[: len(t)]]
        num_tokens, entries = max(fitting, key=lambda found: found[0], default=(0, []))
        return entries, num_tokens

    def forget(self) -> None:
        """After the pool's content was lost."""
        for table in self.tables:
            self._pool.release(table.blocks[::-1])
        self.tables.clear()
        self._tails.clear()

    def _own(self, table: BlockTable, blocks: list[Block]) -> None:
        for block in blocks:
            self._pool.acquire(block)
        table.blocks.extend(blocks)
