"""PrefixCache: chained block hashes -> the physical block that already holds those tokens."""

import hashlib
from array import array
from collections.abc import Iterable

from jpaged.block_pool import Block


class BlockHash:
    """What a full block holds: its own tokens after those of its parent.

    sha256 over the parent's digest and the tokens finds it; equality compares the tokens themselves, back to the start,
    so that two prefixes whose digests collide are still two.
    """

    __slots__ = ("digest", "content", "parent", "_hash")

    def __init__(self, digest: bytes, content: bytes, parent: "BlockHash | None"):
        self.digest, self.content, self.parent = digest, content, parent
        self._hash = hash(digest)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        while self is not other:
            if not isinstance(other, BlockHash) or self.content != other.content:
                return False
            self, other = self.parent, other.parent
        return True

    def __repr__(self) -> str:
        return f"BlockHash({self.digest.hex()[:8]})"


def root_hash(keys: tuple[str, ...] = ()) -> BlockHash:
    """What a sequence's first block comes after: nothing, or what else its KV may depend on, or be kept apart by."""
    if not keys:
        return ROOT_HASH
    content = repr(keys).encode("utf-8", "surrogatepass")
    return BlockHash(hashlib.sha256(content).digest(), content, None)


def hash_block(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    content = array("q", token_ids).tobytes()
    return BlockHash(hashlib.sha256(parent.digest + content).digest(), content, parent)


ROOT_HASH = BlockHash(bytes(32), b"", None)


class PrefixCache:
    """Which full blocks can be shared. It owns no block: a cached block without owner waits in the free queue."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.blocks: dict[BlockHash, Block] = {}

    def extend_hashes(
        self, hashes: list[BlockHash], token_ids: list[int], num_blocks: int, keys: tuple[str, ...] = ()
    ) -> None:
        """Completes hashes, in place, up to the first num_blocks blocks of token_ids. Sequences of different keys share
        nothing."""
        size = self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if i else root_hash(keys)
            hashes.append(hash_block(parent, token_ids[i * size : (i + 1) * size]))

    def match(self, hashes: list[BlockHash], num_blocks: int) -> list[Block]:
        """The longest run of cached blocks from the start, of the first num_blocks at most."""
        matched = []
        for i in range(num_blocks):
            block = self.blocks.get(hashes[i])
            if block is None:
                break
            matched.append(block)
            self._unify(hashes, i, block.block_hash)
        return matched

    def insert(self, block: Block, hashes: list[BlockHash], i: int) -> None:
        """Makes a full block findable: block i of a sequence. Where another has the same content, that stays the cached one."""
        known = self.blocks.get(hashes[i])
        if known is not None:
            self._unify(hashes, i, known.block_hash)
            return
        block.block_hash = hashes[i]
        self.blocks[hashes[i]] = block

    @staticmethod
    def _unify(hashes: list[BlockHash], i: int, equal: BlockHash) -> None:
        """Takes the cached hash in the place of its equal: comparing what comes after then ends here, and not at the start."""
        hashes[i] = equal
        if i + 1 < len(hashes):
            hashes[i + 1].parent = equal

    def evict(self, block: Block) -> None:
        """Forgets a block that is about to be overwritten."""
        if block.block_hash is not None:
            del self.blocks[block.block_hash]
            block.block_hash = None

    def clear(self, keep: Iterable[Block] = ()) -> None:
        """Forgets all content but that of keep."""
        kept = {block.block_hash: block for block in keep if block.block_hash is not None}
        for block in self.blocks.values():
            block.block_hash = None
        for block_hash, block in kept.items():
            block.block_hash = block_hash
        self.blocks = kept
