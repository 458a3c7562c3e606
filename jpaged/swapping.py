"""Swapping: which blocks of a preempted sequence go to host memory, and into which they come back."""

from itertools import takewhile

from jpaged.cache_spec import CacheSpec
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.prefix_cache import PrefixHit
from jpaged.sequence import Sequence
from jpaged.swap_space import SwappedOut


def swap_out(kv: KVCacheManager, seq: Sequence) -> bool:
    """Frees a sequence's blocks, of which seq.swapped says what is to be copied to host memory before the next step
    runs; False, and nothing changed, where host memory is short. No step may be in flight.

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
        return False
    seq.swapped = swapped
    kv.free(seq)
    return True


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
