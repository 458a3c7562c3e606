"""KVCacheManager: gives every scheduled token a slot, and takes the slots back."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import takewhile
from typing import NamedTuple

from jpaged.block_pool import Block, BlockPool
from jpaged.cache_spec import CacheSpec
from jpaged.pinned_blocks import PinnedBlocks
from jpaged.pool_invariants import check_invariants
from jpaged.prefix_cache import NO_HIT, PrefixCache, PrefixHit, root_hash
from jpaged.sequence import Sequence
from jpaged.sequence_group import Fork
from jpaged.swap_space import SwapSpace


class BlockCopy(NamedTuple):
    """Entry `index` of a sequence's table was `source`, which others hold too, and is `destination` from now on."""

    seq: Sequence
    index: int
    source: Block
    destination: Block


class KVCacheManager:
    """Joins the block pool, the sequences' block tables and the prefix cache.

    Running out of blocks is a return value, never an exception. After a None nothing has changed, but that blocks which
    no window sees any more may be free.
    copies: those that the next step must make before its writes. Until it takes them their sources keep an owner more,
    so that they are not given away.
    """

    def __init__(self, spec: CacheSpec, *, enable_prefix_caching: bool = True, num_host_blocks: int = 0):
        self.spec = spec
        self.block_size = spec.block_size
        self.num_groups, self.has_windows = len(spec.windows), spec.has_windows
        self.pool = BlockPool(spec.num_blocks)
        self.prefix_cache = PrefixCache(spec)
        self.enable_prefix_caching = enable_prefix_caching
        self.copies: list[BlockCopy] = []
        self._num_copied: Counter[Block] = Counter()  # how often each block is a source of these
        self.pinned = PinnedBlocks(self.pool, self.prefix_cache)
        self.swap_space = SwapSpace(num_host_blocks)

    @property
    def usage(self) -> float:
        """Part of the usable blocks that are owned, 0 to 1."""
        return self.pool.num_used / self.spec.num_usable_blocks

    @property
    def sharing(self) -> float:
        """Logical blocks over physical ones: how many tables hold a block in use, on average. 1 where nothing is in use."""
        return self.pool.num_owned / self.pool.num_used if self.pool.num_used else 1.0

    def num_blocks_for_fork(self, fork: Fork) -> int:
        """The blocks that a fork needs for itself, to hold all its present tokens and write the next."""
        num_shared = fork.num_tokens // self.block_size * self.block_size
        return self.spec.num_blocks_for(fork.child.num_tokens - num_shared)

    def match_prefix(self, seq: Sequence, forks: List[Fork] = ()) -> PrefixHit:
        """What of seq's tokens is cached; never all, for its last token must be computed. With windows no more than its
        forks share, who must find all that they see."""
        if not self.enable_prefix_caching:
            return NO_HIT
        num_blocks, is_cut = (seq.num_tokens - 1) // self.block_size, self.has_windows and len(forks) > 0
        self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, num_blocks, seq.cache_keys)
        if is_cut:
            num_blocks = min(num_blocks, *(fork.num_tokens // self.block_size for fork in forks))
        entries = [block or self.pool.null_block for block in self.prefix_cache.match(seq.block_hashes, num_blocks)]
        num_found = len(entries) // self.num_groups
        if not self.pinned.tables or is_cut or seq.swapped is not None:
            return PrefixHit(entries, num_found * self.block_size)
        before = seq.block_hashes[num_found - 1] if num_found else root_hash(seq.cache_keys)
        tail, num_more = self.pinned.tail_after(before, seq.token_ids[num_found * self.block_size : -1])
        return PrefixHit(entries + tail, num_found * self.block_size + num_more)

    def num_tokens_found(self, seq: Sequence, hit: PrefixHit) -> int:
        """How many tokens of a sequence that holds no blocks need no computing: they are cached or swapped out."""
        swapped = seq.swapped
        has_all = swapped is not None and hit.num_tokens >= swapped.first_block * self.block_size
        return max(hit.num_tokens, swapped.num_computed_tokens) if has_all else hit.num_tokens

    def admit(self, seq: Sequence, hit: PrefixHit, num_new_tokens: int, *, reserve: int = 0) -> list[Block] | None:
        """Starts a sequence that holds no blocks: shares the cached ones and allocates slots for the next tokens.

        None where the pool cannot hold the whole sequence as it is now and leave reserve blocks free: to admit half a
        prompt, or to take the block that a running sequence needs next, invites preemption.
        """
        assert not seq.block_table.blocks, f"{seq} already holds blocks"
        shared = self._owned(hit.entries)
        num_taken = sum(block.ref_count == 0 for block in shared)
        num_taken += self.spec.num_blocks_for(seq.num_tokens - hit.num_tokens // self.block_size * self.block_size)
        # A window gives back what it has passed of the hit: never are more taken than of a sequence that has none.
        if min(num_taken, self.spec.num_blocks_for(seq.num_tokens)) + reserve > self.pool.num_free:
            return None
        for block in shared:
            self.pool.acquire(block)
        seq.block_table.blocks.extend(hit.entries)
        seq.num_computed_tokens = self.num_tokens_found(seq, hit)
        if self.has_windows:  # what comes back from host memory may go on from where they have passed all of the hit
            self._leave_behind(seq, seq.num_computed_tokens)
        return self.allocate_slots(seq, num_new_tokens)

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> list[Block] | None:
        """Blocks for the next num_new_tokens tokens after the computed ones; None, and nothing taken, if too few are free.

        Where the first of these tokens would write blocks that others hold too, seq gets copies of them, the first of
        the blocks returned. The last one to hold a block writes in place.
        """
        blocks, num_copied = seq.block_table.blocks, self._num_copied
        first, shared = seq.num_computed_tokens // self.block_size * self.num_groups, []
        if first < len(blocks):
            written = range(first, first + self.num_groups)
            shared = [i for i in written if blocks[i].ref_count - num_copied[blocks[i]] > 1]
        missing = self._missing_entries(seq, num_new_tokens)
        num_new = len(shared) + sum(missing)
        if num_new > self.pool.num_free and self.has_windows:
            self._leave_behind(seq, seq.num_computed_tokens)
        if num_new > self.pool.num_free:
            return None
        new = [self.pool.pop_free() for _ in range(num_new)]
        for block in new:
            self.prefix_cache.evict(block)
        for i, block in zip(shared, new):
            self.copies.append(BlockCopy(seq, i, source=blocks[i], destination=block))
            num_copied[blocks[i]] += 1
            blocks[i] = block
        added = new[len(shared) :]
        if len(added) < len(missing):
            taken = iter(added)
            added = [next(taken) if is_seen else self.pool.null_block for is_seen in missing]
        blocks.extend(added)
        return new

    def num_missing(self, seq: Sequence, num_new_tokens: int) -> int:
        """The blocks that seq's table lacks for the next num_new_tokens tokens after the computed ones."""
        return sum(self._missing_entries(seq, num_new_tokens))

    def _missing_entries(self, seq: Sequence, num_new_tokens: int) -> list[bool]:
        """The entries that seq's table lacks for these tokens: whether any of them, or a later one, sees the block."""
        num_have = len(seq.block_table.blocks) // self.num_groups
        num_logical = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        if not self.has_windows:
            return [True] * (num_logical - num_have)
        seen_from = self.spec.seen_from(seq.num_computed_tokens)
        return [i >= first for i in range(num_have, num_logical) for first in seen_from]

    def _owned(self, entries: Iterable[Block]) -> list[Block]:
        """Without the null block, which stands where a window has passed."""
        return [block for block in entries if block is not self.pool.null_block]

    def _leave_behind(self, seq: Sequence, num_tokens: int) -> None:
        """Frees the blocks that no token after num_tokens tokens sees."""
        blocks, null_block, passed = seq.block_table.blocks, self.pool.null_block, []
        for group, first in enumerate(self.spec.seen_from(num_tokens)):
            entries = range(group, len(blocks), self.num_groups)[:first]
            for i in takewhile(lambda i: blocks[i] is not null_block, reversed(entries)):
                passed.append(blocks[i])
                blocks[i] = null_block
        self.pool.release(passed)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Lets a child that holds no blocks share the KV of its first num_tokens tokens, which are the parent's too.

        These are all that the parent has computed, or fill whole blocks: the last block that a sequence has begun to
        fill is then not full for anybody, and so never cached.
        """
        assert not child.block_table.blocks, f"{child} already holds blocks"
        is_whole = num_tokens % self.block_size == 0
        assert num_tokens == parent.num_computed_tokens or (is_whole and num_tokens < parent.num_computed_tokens)
        shared = parent.block_table.blocks[: self.spec.num_logical_for(num_tokens) * self.num_groups]
        for block in self._owned(shared):
            self.pool.acquire(block)
        child.block_table.blocks.extend(shared)
        child.num_computed_tokens = num_tokens

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make since the last call: no source is a destination, and no destination comes twice."""
        copies, self.copies = self.copies, []
        self._num_copied.clear()
        self.pool.release([copy.source for copy in copies])
        return copies

    def mark_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Makes the blocks that became full when tokens [start, end) were computed findable by other sequences, then
        frees those that no later token sees.

        All of these tokens must be known, and their step must have run.
        """
        first, last = start // self.block_size, end // self.block_size
        if first == last:
            return
        if self.enable_prefix_caching:
            self.prefix_cache.extend_hashes(seq.block_hashes, seq.token_ids, last, seq.cache_keys)
            for i in range(first * self.num_groups, last * self.num_groups):
                if (block := seq.block_table.blocks[i]) is not self.pool.null_block:
                    self.prefix_cache.insert(block, i % self.num_groups, seq.block_hashes, i // self.num_groups)
        if self.has_windows:
            self._leave_behind(seq, end)

    def distrust(self, seq: Sequence) -> None:
        """Makes what seq alone has computed findable no more: its KV gave logits that are no numbers. What it found in
        the cache stays, and what others hold: a request that brings about such logits must cost nobody a prefix."""
        for block in seq.block_table.blocks[seq.num_cached_tokens // self.block_size * self.num_groups :]:
            if block.ref_count == 1:
                self.prefix_cache.evict(block)

    def free(self, seq: Sequence) -> None:
        """Gives all blocks back, the tail first: a prefix is worth more than its continuation."""
        self.take_back_copies(seq)
        self.pool.release(self._owned(reversed(seq.block_table.blocks)))
        seq.block_table.blocks.clear()
        seq.num_computed_tokens = 0

    def take_back_copies(self, seq: Sequence) -> None:
        """Gives seq the blocks again that it had before the copies that are still to be made for it."""
        for copy in self.copies:
            if copy.seq is seq:
                seq.block_table.blocks[copy.index] = copy.source
                self._num_copied[copy.source] -= 1
                self.pool.release([copy.destination])
        if self.copies:
            self.copies = [copy for copy in self.copies if copy.seq is not seq]

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content that is not pinned; False, and nothing forgotten, while sequences hold blocks, or
        have some in host memory."""
        pinned = self.pinned.blocks
        if self.pool.num_used > len(pinned) or self.swap_space.num_used:
            return False
        self.prefix_cache.clear(keep=pinned)
        return True

    def forget(self) -> None:
        """After the pool's content was lost: no block is cached or pinned any more."""
        self.prefix_cache.clear()
        self.pinned.forget()

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Asserts what must always hold of the pool, given every sequence that exists."""
        copies = [(copy.source, copy.destination) for copy in self.copies]
        check_invariants(list(sequences), self.pool, self.prefix_cache, copies, self.pinned.tables, self.swap_space)
