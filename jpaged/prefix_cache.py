"""PrefixCache: chained block hashes -> the physical block that already holds those tokens."""

import hashlib
from array import array
from collections.abc import Container
from typing import NamedTuple

from jpaged.block_pool import Block
from jpaged.cache_spec import CacheSpec


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


class PrefixHit(NamedTuple):
    """What a sequence can start from: the first entries of its block table, which hold its first num_tokens tokens."""

    entries: list[Block]
    num_tokens: int


NO_HIT = PrefixHit([], 0)
"""That of a sequence for which nobody has looked."""


class PrefixCache:
    """Which full blocks can be shared. It owns no block: a cached block without owner waits in the free queue.

    blocks: of each content, the block of every attention group, None where the group has none.
    """

    def __init__(self, spec: CacheSpec):
        self.spec = spec
        self.block_size = spec.block_size
        self.blocks: dict[BlockHash, list[Block | None]] = {}
        self._none = [None] * len(spec.windows)

    def extend_hashes(
        self, hashes: list[BlockHash], token_ids: list[int], num_blocks: int, keys: tuple[str, ...] = ()
    ) -> None:
        """Completes hashes, in place, up to the first num_blocks blocks of token_ids. Sequences of different keys share
        nothing."""
        size = self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if i else root_hash(keys)
            hashes.append(hash_block(parent, token_ids[i * size : (i + 1) * size]))

    def match(self, hashes: list[BlockHash], num_blocks: int) -> list[Block | None]:
        """The entries of the longest block table that can be had of the first num_blocks logical blocks; None where a window
        has passed a block.

        Of groups that see everything all its blocks are cached, of those with a window the last ones.
        """
        found = []
        for i in range(num_blocks):
            entry = self.blocks.get(hashes[i])
            if entry is not None:
                self._unify(hashes, i, entry)
            elif None in self.spec.windows:
                break
            found.append(entry or self._none)
        if not self.spec.has_windows:
            return [entry[0] for entry in found]
        num_found = self._num_seen_whole(found)
        seen_from = self.spec.seen_from(num_found * self.block_size)
        return [
            block if i >= first else None
            for i, entry in enumerate(found[:num_found])
            for first, block in zip(seen_from, entry)
        ]

    def _num_seen_whole(self, found: list[list[Block | None]]) -> int:
        """The most logical blocks after which every group has all that it sees."""
        num_blocks = i = len(found)
        seen_from = self.spec.seen_from(num_blocks * self.block_size)
        while i > min(seen_from):
            i -= 1
            if any(i >= first and block is None for first, block in zip(seen_from, found[i])):
                num_blocks, seen_from = i, self.spec.seen_from(i * self.block_size)
        return num_blocks

    def insert(self, block: Block, group: int, hashes: list[BlockHash], i: int) -> None:
        """Makes a full block findable: a group's of logical block i. Where another has the same content, that stays the
        cached one."""
        entry = self.blocks.get(hashes[i])
        if entry is None:
            self.blocks[hashes[i]] = entry = self._none.copy()
        else:
            self._unify(hashes, i, entry)
        if entry[group] is None:
            entry[group], block.block_hash = block, hashes[i]

    @staticmethod
    def _unify(hashes: list[BlockHash], i: int, entry: list[Block | None]) -> None:
        """Takes the cached hash in the place of its equal: comparing what comes after then ends here, and not at the start."""
        equal = hashes[i] = (entry[0] or next(filter(None, entry))).block_hash
        if i + 1 < len(hashes):
            hashes[i + 1].parent = equal

    def evict(self, block: Block) -> None:
        """Forgets a block that is about to be overwritten."""
        if block.block_hash is not None:
            entry = self.blocks[block.block_hash]
            entry[entry.index(block)] = None
            if not any(entry):
                del self.blocks[block.block_hash]
            block.block_hash = None

    def clear(self, keep: Container[Block] = ()) -> None:
        """Forgets all content but that of keep."""
        for block in [block for entry in self.blocks.values() for block in entry]:
            if block is not None and block not in keep:
                self.evict(block)
