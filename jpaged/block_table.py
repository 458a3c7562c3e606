"""BlockTable: a sequence's logical blocks -> physical blocks."""

from jpaged.block_pool import Block


class BlockTable:
    """With G attention groups, blocks[i * G + g] holds group g's KV of tokens [i * block_size, (i + 1) * block_size), logical
    block i. It is the null block where the group's window has passed it."""

    __slots__ = ("blocks",)

    def __init__(self):
        self.blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def block_ids(self, start: int = 0) -> list[int]:
        """Physical ids from entry start on."""
        return [block.block_id for block in self.blocks[start:]]

    def slot(self, position: int, block_size: int, group: int = 0, num_groups: int = 1) -> int:
        """The pool slot in which a group has the token at position."""
        block = self.blocks[position // block_size * num_groups + group]
        return block.block_id * block_size + position % block_size
