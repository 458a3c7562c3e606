"""What must always hold of the pool, whatever requests do."""

from collections import Counter
from collections.abc import Sequence as List

from jpaged.block_pool import Block, BlockPool
from jpaged.block_table import BlockTable
from jpaged.prefix_cache import PrefixCache
from jpaged.sequence import Sequence
from jpaged.swap_space import SwapSpace


def check_invariants(
    sequences: List[Sequence],
    pool: BlockPool,
    prefix_cache: PrefixCache,
    copies: List[tuple[Block, Block]],
    pinned: List[BlockTable],
    swap_space: SwapSpace,
) -> None:
    """Asserts it, given every sequence that exists; copies are the (source, destination) that are still to be made."""
    queue = pool.free_queue()
    assert len(queue) == pool.num_free, (len(queue), pool.num_free)
    assert pool.num_free + pool.num_used == len(pool.blocks) - 1
    tables = [*(seq.block_table for seq in sequences), *pinned]
    owners = Counter(block.block_id for table in tables for block in table.blocks if block is not pool.null_block)
    owners += Counter(source.block_id for source, _ in copies)
    written = {destination for _, destination in copies}
    assert len(written) == len(copies) and written.isdisjoint(source for source, _ in copies), copies
    free_ids = {block.block_id for block in queue}
    assert len(free_ids) == len(queue), "a block is queued twice"
    for block in pool.blocks[1:]:
        assert block.ref_count == owners[block.block_id], f"{block} has {owners[block.block_id]} tables"
        assert (block.ref_count == 0) == (block.block_id in free_ids), f"{block} is both used and free, or neither"
    assert pool.num_owned == owners.total(), (pool.num_owned, owners.total())
    assert pool.null_block.ref_count == 0 and 0 not in owners and 0 not in free_ids
    cached = [
        (content, block) for content, entry in prefix_cache.blocks.items() for block in entry if block is not None
    ]
    for block_hash, block in cached:
        assert block.block_hash == block_hash, f"{block} is cached under another hash"
    num_hashed = sum(block.block_hash is not None for block in pool.blocks)
    assert num_hashed == len(cached), (num_hashed, len(cached))
    in_host = [seq for seq in sequences if seq.swapped is not None]
    assert swap_space.num_used == sum(seq.swapped.num_host_blocks for seq in in_host)
    assert swap_space.num_used <= swap_space.capacity
    assert not any(seq.block_table.blocks for seq in in_host), "a sequence is both swapped out and in the pool"
    spec = prefix_cache.spec
    num_groups = len(spec.windows)
    for seq in sequences:
        blocks, num_computed = seq.block_table.blocks, seq.num_computed_tokens
        assert num_computed * num_groups <= len(blocks) * spec.block_size, f"{seq} has KV outside its blocks"
        # Writing happens at num_computed_tokens and after: what is there may be shared until then, but not found.
        for block in blocks[num_computed // spec.block_size * num_groups :]:
            assert block.block_hash is None, f"{seq} would write {block}, which others may find"
        for group, first in enumerate(spec.seen_from(num_computed)):
            seen = blocks[first * num_groups + group :: num_groups]
            assert pool.null_block not in seen, f"{seq} lacks blocks that group {group} sees"
