"""KVCacheManager: gives every scheduled token a slot, and takes the slots back."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jpaged.block_pool import Block, BlockPool
from jpaged.block_table import BlockTable
from jpaged.config import CacheSpec
from jpaged.pool_invariants import check_invariants
from jpaged.prefix_cache import BlockHash, PrefixCache
from jpaged.sequence import Sequence
from jpaged.sequence_group import Fork
from jpaged.swap_space import SwappedOut, SwapSpace


class BlockCopy(NamedTuple):
    """Block `index` of a sequence's table was `source`, which others hold too, and is `destination` from now on."""

    seq: Sequence
    index: int
    source: Block
    destination: Block


class KVCacheManager:
    """Joins the block pool, the sequences' block tables and the prefix cache.

    Running out of blocks is a return value, never an exception. After a None nothing has changed.
    copies: those that the next step must make before its writes. Until it takes them their sources keep an owner more,
    so that they are not given away.
    """

    def __init__(self, spec: CacheSpec, *, enable_prefix_caching: bool = True, num_host_blocks: int = 0):
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = BlockPool(spec.num_blocks)
        self.prefix_cache = PrefixCache(spec.block_size)
        self.enable_prefix_caching = enable_prefix_caching
        self.copies: list[BlockCopy] = []
        self._num_copied: Counter[Block] = Counter()  # how often each block is a source of these
        self.pinned: list[BlockTable] = []
        self.swap_space = SwapSpace(num_host_blocks)

    @property
    def usage(self) -> float:
        """Part of the usable blocks that are owned, 0 to 1."""
        return self.pool.num_used / self.spec.num_usable_blocks

    @property
    def sharing(self) -> float:
        """Logical blocks over physical ones: how many tables hold a block in use, on average. 1 where nothing is in use."""
        return self.pool.num_owned / self.pool.num_used if self.pool.num_used else 1.0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_for_fork(self, fork: Fork) -> int:
        """The blocks that a fork needs for itself, to hold all its present tokens and write the next."""
        return self.num_blocks_for(fork.child.num_tokens) - fork.num_tokens // self.block_size

    def match_prefix(self, seq: Sequence) -> list[Block]:
        """The cached blocks that seq can start from; never all of it, for its last token must be computed."""
        if not self.enable_prefix_caching:
            return []
        num_blocks = (seq.num_tokens - 1) // self.block_size
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, num_blocks, seq.cache_keys)
        return self.prefix_cache.match(seq.block_hashes, num_blocks)

    def num_tokens_found(self, seq: Sequence, matched: list[Block]) -> int:
        """How many tokens of a sequence that holds no blocks need no computing: they are cached or swapped out."""
        num_matched, swapped = len(matched) * self.block_size, seq.swapped
        has_all = swapped is not None and len(matched) >= swapped.first_block
        return max(num_matched, swapped.num_computed_tokens) if has_all else num_matched

    def admit(
        self, seq: Sequence, matched: list[Block], num_new_tokens: int, *, reserve: int = 0
    ) -> list[Block] | None:
        """Starts a sequence that holds no blocks: shares the matched ones and allocates slots for the next tokens.

        None where the pool cannot hold the whole sequence as it is now and leave reserve blocks free: to admit half a
        prompt, or to take the block that a running sequence needs next, invites preemption.
        """
        assert not seq.block_table.blocks, f"{seq} already holds blocks"
        num_matched_free = sum(block.ref_count == 0 for block in matched)
        if self.num_blocks_for(seq.num_tokens) - len(matched) + reserve > self.pool.num_free - num_matched_free:
            return None
        for block in matched:
            self.pool.acquire(block)
        seq.block_table.blocks.extend(matched)
        seq.num_computed_tokens = self.num_tokens_found(seq, matched)
        return self.allocate_slots(seq, num_new_tokens)

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> list[Block] | None:
        """Blocks for the next num_new_tokens tokens after the computed ones; None, and nothing taken, if too few are free.

        Where the first of these tokens would write a block that others hold too, seq gets a copy of it, the first of
        the blocks returned. The last one to hold it writes in place.
        """
        blocks = seq.block_table.blocks
        num_missing = max(0, -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size) - len(blocks))
        first = seq.num_computed_tokens // self.block_size
        is_shared = first < len(blocks) and blocks[first].ref_count - self._num_copied[blocks[first]] > 1
        if num_missing + is_shared == 0:
            return []
        if num_missing + is_shared > self.pool.num_free:
            return None
        new = [self.pool.pop_free() for _ in range(num_missing + is_shared)]
        for block in new:
            self.prefix_cache.evict(block)
        if is_shared:
            self.copies.append(BlockCopy(seq, first, source=blocks[first], destination=new[0]))
            self._num_copied[blocks[first]] += 1
            blocks[first] = new[0]
        blocks.extend(new[is_shared:])
        return new

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Lets a child that holds no blocks share the KV of its first num_tokens tokens, which are the parent's too.

        These are all that the parent has computed, or fill whole blocks: the last block that a sequence has begun to
        fill is then not full for anybody, and so never cached.
        """
        assert not child.block_table.blocks, f"{child} already holds blocks"
        is_whole = num_tokens % self.block_size == 0
        assert num_tokens == parent.num_computed_tokens or (is_whole and num_tokens < parent.num_computed_tokens)
        shared = parent.block_table.blocks[: self.num_blocks_for(num_tokens)]
        for block in shared:
            self.pool.acquire(block)
        child.block_table.blocks.extend(shared)
        child.num_computed_tokens = num_tokens

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make since the last call: no source is a destination, and no destination comes twice."""
        copies, self.copies = self.copies, []
        self._num_copied.clear()
        self.pool.release([copy.source for copy in copies])
        return copies

    def cache_full_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Makes the blocks that became full when tokens [start, end) were computed findable by other sequences.

        All of these tokens must be known, and their step must have run.
        """
        if not self.enable_prefix_caching:
            return
        first, last = start // self.block_size, end // self.block_size
        if first == last:
            return
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, last, seq.cache_keys)
        for i in range(first, last):
            self.prefix_cache.insert(seq.block_table.blocks[i], seq.block_hashes, i)

    def distrust(self, seq: Sequence) -> None:
        """Makes what seq has computed findable no more: its KV gave logits that are no numbers."""
        for block in seq.block_table.blocks:
            self.prefix_cache.evict(block)

    def free(self, seq: Sequence) -> None:
        """Gives all blocks back, the tail first: a prefix is worth more than its continuation."""
        self.pool.release(seq.block_table.blocks[::-1])
        seq.block_table.blocks.clear()
        seq.num_computed_tokens = 0
        dropped = [copy.source for copy in self.copies if copy.seq is seq]
        if dropped:
            self.copies = [copy for copy in self.copies if copy.seq is not seq]
            self._num_copied.subtract(dropped)
            self.pool.release(dropped)

    def swap_out(self, seq: Sequence) -> bool:
        """Frees a sequence's blocks, of which seq.swapped says what is to be copied to host memory before the next step
        runs; False, and nothing changed, where host memory is short. No step may be in flight.

        A prefix that others hold too is not copied: it stays findable while they live. Where it is gone when the sequence
        comes back, all of it is recomputed.
        """
        assert seq.num_computed_tokens < seq.num_tokens, f"{seq} has a token in flight"
        num_blocks, first = self.num_blocks_for(seq.num_computed_tokens), 0
        blocks = seq.block_table.blocks[:num_blocks]
        while first < num_blocks and blocks[first].ref_count > 1 and blocks[first].block_hash is not None:
            first += 1
        swapped = SwappedOut(first, seq.num_computed_tokens, [block.block_id for block in blocks[first:]])
        if not self.swap_space.take(swapped):
            return False
        seq.swapped = swapped
        self.free(seq)
        return True

    def swap_in(self, seq: Sequence, num_matched: int) -> SwappedOut | None:
        """For a sequence just admitted with num_matched cached blocks: what is to be copied into its blocks before the
        next step runs; None where nothing is, or all of it has to be recomputed."""
        swapped, table = seq.swapped, seq.block_table
        if swapped is None:
            return None
        self.discard_swapped(seq)
        if num_matched < swapped.first_block or num_matched * self.block_size >= swapped.num_computed_tokens:
            return None
        num_cached = num_matched - swapped.first_block
        last = swapped.first_block + len(swapped.block_ids)
        swapped.block_ids = [0] * num_cached + [block.block_id for block in table.blocks[num_matched:last]]
        self.cache_full_blocks(seq, num_matched * self.block_size, swapped.num_computed_tokens)
        return swapped

    def discard_swapped(self, seq: Sequence) -> None:
        """Gives up what a sequence has in host memory, if anything."""
        if seq.swapped is not None:
            self.swap_space.give_back(seq.swapped)
            seq.swapped = None

    def pin(self, token_ids: list[int]) -> None:
        """Owns the cached full blocks of a prefix, for good."""
        hashes: list[BlockHash] = []
        num_blocks = len(token_ids) // self.block_size
        self.prefix_cache.extend_hashes(hashes, token_ids, num_blocks)
        table = BlockTable()
        table.blocks.extend(self.prefix_cache.match(hashes, num_blocks))
        for block in table.blocks:
            self.pool.acquire(block)
        self.pinned.append(table)

    @property
    def pinned_blocks(self) -> set[Block]:
        return {block for table in self.pinned for block in table.blocks}

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content that is not pinned; False, and nothing forgotten, while sequences hold blocks, or
        have some in host memory."""
        pinned = self.pinned_blocks
        if self.pool.num_used > len(pinned) or self.swap_space.num_used:
            return False
        self.prefix_cache.clear(keep=pinned)
        return True

    def forget(self) -> None:
        """After the pool's content was lost: no block is cached or pinned any more."""
        self.prefix_cache.clear()
        for table in self.pinned:
            self.pool.release(table.blocks[::-1])
        self.pinned.clear()

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Asserts what must always hold of the pool, given every sequence that exists."""
        copies = [(copy.source, copy.destination) for copy in self.copies]
        check_invariants(list(sequences), self.pool, self.prefix_cache, copies, self.pinned, self.swap_space)
