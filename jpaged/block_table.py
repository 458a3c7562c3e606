"""BlockTable: a sequence's logical blocks -> physical blocks."""

from jpaged.block_pool import Block


class BlockTable:
    """blocks[i] holds the KV of tokens [i * block_size, (i + 1) * block_size)."""

    __slots__ = ("blocks",)

    def __init__(self):
        self.blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def block_ids(self, start: int = 0) -> list[int]:
        """Physical ids from logical block start on."""
        return [block.block_id for block in self.blocks[start:]]

    def slot(self, position: int, block_size: int) -> int:
        """The pool slot of the token at position."""
        return self.blocks[position // block_size].block_id * block_size + position % block_size
