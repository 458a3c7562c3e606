"""PrefixCache: chained block hashes -> the physical block that already holds those tokens."""

import hashlib
from array import array

from jpaged.block_pool import Block

ROOT_HASH = b"\x00" * 32


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """sha256 over the parent's hash and this block's tokens: equal hashes mean equal whole prefixes."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Which full blocks can be shared. It owns no block: a cached block without owner waits in the free queue."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.blocks: dict[bytes, Block] = {}

    def extend_hashes(self, hashes: list[bytes], token_ids: list[int], num_blocks: int) -> None:
        """Completes hashes, in place, up to the first num_blocks blocks of token_ids."""
        size = self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[i - 1] if i else ROOT_HASH
            hashes.append(hash_block(parent, token_ids[i * size : (i + 1) * size]))

    def match(self, hashes: list[bytes]) -> list[Block]:
        """The longest run of cached blocks from the start."""
        matched = []
        for block_hash in hashes:
            block = self.blocks.get(block_hash)
            if block is None:
                break
            matched.append(block)
        return matched

    def insert(self, block: Block, block_hash: bytes) -> None:
        """Makes a full block findable. Where another block has the same content, that one stays the cached one."""
        if block_hash not in self.blocks:
            block.block_hash = block_hash
            self.blocks[block_hash] = block

    def evict(self, block: Block) -> None:
        """Forgets a block that is about to be overwritten."""
        if block.block_hash is not None:
            del self.blocks[block.block_hash]
            block.block_hash = None

    def clear(self) -> None:
        for block in self.blocks.values():
            block.block_hash = None
        self.blocks.clear()
