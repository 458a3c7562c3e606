"""BlockPool: every block but the null block is either owned or waits its turn, and the longest free is reused first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.block_pool import BlockPool


def ids(blocks):
    return [block.block_id for block in blocks]


def test_null_block_is_never_handed_out():
    pool = BlockPool(6)
    assert ids(pool.pop_free() for _ in range(pool.num_free)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)
    with pytest.raises(AssertionError, match="no free block"):
        pool.pop_free()


def test_blocks_are_reused_in_the_order_in_which_they_were_freed():
    pool = BlockPool(5)
    blocks = [pool.pop_free() for _ in range(4)]
    pool.release([blocks[2], blocks[0]])
    pool.release([blocks[3], blocks[1]])
    assert ids(pool.pop_free() for _ in range(4)) == [3, 1, 4, 2]


def test_shared_block_is_free_only_when_its_last_owner_lets_go():
    pool = BlockPool(3)
    block = pool.pop_free()
    pool.acquire(block)
    pool.release([block])
    assert (block.ref_count, pool.num_free) == (1, 1)
    pool.release([block])
    assert (block.ref_count, pool.num_free) == (0, 2)


def test_releasing_a_block_once_too_often_is_our_error():
    pool = BlockPool(3)
    block = pool.pop_free()
    pool.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([block])


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_pool_that_holds_nothing_is_refused(num_blocks):
    with pytest.raises(ValueError, match=rf"at least 2 blocks .*got {num_blocks}"):
        BlockPool(num_blocks)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.sampled_from(["pop", "acquire", "release"]), st.integers(0, 99)), max_size=60),
)
def test_queue_and_counts_are_those_of_a_plain_list(num_blocks, operations):
    pool, queue, owners = BlockPool(num_blocks), list(range(1, num_blocks)), dict.fromkeys(range(num_blocks), 0)
    for operation, number in operations:
        block_id = 1 + number % (num_blocks - 1)
        block = pool.blocks[block_id]
        if operation == "pop" and queue:
            first = queue.pop(0)
            assert pool.pop_free().block_id == first
            owners[first] = 1
        elif operation == "acquire":
            if owners[block_id] == 0:
                queue.remove(block_id)
            pool.acquire(block)
            owners[block_id] += 1
        elif operation == "release" and owners[block_id]:
            pool.release([block])
            owners[block_id] -= 1
            if owners[block_id] == 0:
                queue.append(block_id)
        assert ids(pool.free_queue()) == queue
        assert {block.block_id: block.ref_count for block in pool.blocks} == owners
        assert (pool.num_free, pool.num_used) == (len(queue), num_blocks - 1 - len(queue))
