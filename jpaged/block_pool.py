"""Block, BlockPool: every KV block of the pool, who owns it, and which is reused next."""

from collections.abc import Hashable


class Block:
    """A fixed run of KV slots. A free block that is cached keeps its hash until it is reused."""

    __slots__ = ("block_id", "ref_count", "block_hash", "prev_free", "next_free")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: Hashable | None = None  # what it holds, where the prefix cache knows it
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.block_hash is not None})"


class BlockPool:
    """Reference counts and the free queue, least recently freed first.

    The queue is a doubly linked ring through the blocks themselves, so that a cached block is taken out of its middle
    in O(1). Block 0, the null block, is never allocated: padding writes land there.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.num_free = 0
        self.num_owned = 0  # the ref_counts of all blocks together: entries of all tables
        self._ring = Block(-1)  # sentinel: its next is the block to reuse first
        self._ring.prev_free = self._ring.next_free = self._ring
        for block in self.blocks[1:]:
            self._push(block)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - 1 - self.num_free

    def pop_free(self) -> Block:
        """The next block to reuse, with ref_count 1. Its old hash is still on it: the caller forgets it."""
        block = self._ring.next_free
        assert block is not self._ring, "no free block; the caller checks num_free first"
        self._unlink(block)
        block.ref_count = 1
        self.num_owned += 1
        return block

    def acquire(self, block: Block) -> None:
        """One more owner; a free block leaves the queue."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1
        self.num_owned += 1

    def release(self, blocks: list[Block]) -> None:
        """One owner less for each; those without owner queue up in the given order."""
        self.num_owned -= len(blocks)
        for block in blocks:
            assert block.ref_count > 0, f"{block} is released once too often"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._push(block)

    def free_queue(self) -> list[Block]:
        """The free blocks in the order of reuse."""
        queue, block = [], self._ring.next_free
        while block is not self._ring:
            queue.append(block)
            block = block.next_free
        return queue

    def _push(self, block: Block) -> None:
        last = self._ring.prev_free
        last.next_free, block.prev_free = block, last
        block.next_free, self._ring.prev_free = self._ring, block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        block.prev_free.next_free, block.next_free.prev_free = block.next_free, block.prev_free
        block.prev_free = block.next_free = None
        self.num_free -= 1
