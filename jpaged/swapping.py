"""Swapping: which blocks of a preempted sequence go to host memory, and into which they come back."""

from collections import Counter
from itertools import takewhile

from jpaged.block_pool import Block
from jpaged.cache_spec import CacheSpec
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.prefix_cache import PrefixHit
from jpaged.sequence import Sequence
from jpaged.swap_space import SwappedGroup, SwappedOut, SwappedTable


def swap_out(kv: KVCacheManager, seq: Sequence) -> SwappedOut | None:
    """Frees a sequence's blocks. Returns what of them is to be copied to host memory before the next step runs, which is
    seq.swapped, too; None, and nothing changed, where host memory is short. No step may be in flight.

    A prefix that others hold too is not copied: it stays findable while they live. Where it is gone when the sequence
    comes back, all of it is recomputed. With windows all is copied: what others hold may be too little to start from.
    """
    assert seq.num_computed_tokens < seq.num_tokens, f"{seq} has a token in flight"
    blocks, first = seq.block_table.blocks, 0
    if not kv.has_windows:
        blocks = blocks[: kv.spec.num_logical_for(seq.num_computed_tokens)]
        first = sum(1 for _ in takewhile(lambda block: block.ref_count > 1 and block.block_hash is not None, blocks))
    copied = _entries_to_copy(kv.spec, first, seq.num_computed_tokens)
    swapped = SwappedOut(first, seq.num_computed_tokens, [blocks[i].block_id for i in copied])
    if not kv.swap_space.take(swapped):
        return None
    seq.swapped = swapped
    kv.free(seq)
    return swapped


def swap_in(kv: KVCacheManager, seq: Sequence, hit: PrefixHit) -> SwappedOut | None:
    """For a sequence just admitted with that hit: what is to be copied into its blocks before the next step runs;
    None where nothing is, or all of it has to be recomputed."""
    swapped = seq.swapped
    if swapped is None:
        return None
    discard_swapped(kv, seq)
    if hit.num_tokens < swapped.first_block * kv.block_size or hit.num_tokens >= swapped.num_computed_tokens:
        return None
    copied = _entries_to_copy(kv.spec, swapped.first_block, swapped.num_computed_tokens)
    blocks = seq.block_table.blocks
    swapped.block_ids = [0 if i < len(hit.entries) else blocks[i].block_id for i in copied]
    kv.mark_computed(seq, hit.num_tokens, swapped.num_computed_tokens)
    return swapped


def swap_out_group(kv: KVCacheManager, seqs: list[Sequence]) -> SwappedGroup | None:
    """The same for a request's sequences, which share blocks; all must decode. What several hold is copied once, and
    seqs[0] holds it. Where host memory is short, copies that were still to be made are taken back all the same."""
    places: dict[Block, int] = {}
    tables = []
    for seq in seqs:
        kv.take_back_copies(seq)  # a copy that is not made has no content yet; its source has
        blocks, num_tokens = seq.block_table.blocks, seq.num_computed_tokens
        copied = set(_entries_to_copy(kv.spec, 0, num_tokens))
        entries = range(kv.spec.num_logical_for(num_tokens) * kv.num_groups)
        places_of = [places.setdefault(blocks[i], len(places)) if i in copied else None for i in entries]
        tables.append(SwappedTable(seq, num_tokens, places_of))
    swapped = SwappedGroup(0, seqs[0].num_computed_tokens, [block.block_id for block in places], tables=tables)
    if not kv.swap_space.take(swapped):
        return None
    seqs[0].swapped = swapped
    for seq in seqs:
        kv.free(seq)
    return swapped


def swap_in_group(kv: KVCacheManager, holder: Sequence, *, reserve: int) -> SwappedGroup | None:
    """Gives the sequences whose blocks holder has in host memory tables that share as before, and slots for their next
    tokens. Returns what is to be copied before the next step runs; None, and nothing changed, where the pool cannot
    hold all of it and leave reserve blocks free."""
    swapped, pool = holder.swapped, kv.pool
    tables = swapped.unfinished
    owners = Counter(place for table in tables for place in table.places if place is not None)
    if len(owners) + _num_for_next_tokens(kv, tables) + reserve > pool.num_free:
        return None
    discard_swapped(kv, holder)
    blocks = {place: pool.pop_free() for place in owners}
    for place, block in blocks.items():
        kv.prefix_cache.evict(block)
        for _ in range(owners[place] - 1):
            pool.acquire(block)
    for seq, num_tokens, places in tables:
        seq.block_table.blocks.extend(pool.null_block if place is None else blocks[place] for place in places)
        seq.num_computed_tokens = num_tokens
        kv.mark_computed(seq, 0, num_tokens)
    for seq, _, _ in tables:
        assert kv.allocate_slots(seq, 1) is not None, f"{seq} finds fewer blocks than were counted"
    swapped.block_ids = [blocks[i].block_id if i in blocks else 0 for i in range(len(swapped.block_ids))]
    return swapped


def _num_for_next_tokens(kv: KVCacheManager, tables: list[SwappedTable]) -> int:
    """The blocks that take the next token of each: new ones, or copies for all but one of those that share their last."""
    shared = [table.places[-kv.num_groups :] for table in tables if table.num_computed_tokens % kv.block_size]
    num_new = (len(tables) - len(shared)) * kv.num_groups
    return num_new + sum(count - 1 for count in Counter(place for last in shared for place in last).values())


def discard_swapped(kv: KVCacheManager, seq: Sequence) -> None:
    """Gives up what a sequence has in host memory, if anything."""
    if seq.swapped is not None:
        kv.swap_space.give_back(seq.swapped)
        seq.swapped = None


def _entries_to_copy(spec: CacheSpec, first_block: int, num_tokens: int) -> list[int]:
    """The entries of a block table, from logical block first_block on, that hold tokens below num_tokens which later ones
    see."""
    groups = list(enumerate(spec.seen_from(num_tokens)))
    logical = range(first_block, spec.num_logical_for(num_tokens))
    return [i * len(groups) + group for i in logical for group, first in groups if i >= first]
