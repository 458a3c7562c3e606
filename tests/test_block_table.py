"""BlockTable: the slot of a position is that of its block, whatever order the blocks lie in."""

from jpaged.block_pool import BlockPool
from jpaged.block_table import BlockTable


def test_slots_follow_the_blocks_in_logical_order():
    pool, table = BlockPool(8), BlockTable()
    table.blocks = [pool.blocks[i] for i in (5, 2, 7)]
    assert [table.slot(position, 4) for position in range(12)] == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31]
    assert (len(table), table.block_ids(), table.block_ids(1), table.block_ids(3)) == (3, [5, 2, 7], [2, 7], [])
