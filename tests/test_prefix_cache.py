"""PrefixCache: a hash stands for a whole prefix, and a match is the longest run of blocks that hold it."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.block_pool import BlockPool
from jpaged.prefix_cache import ROOT_HASH, PrefixCache, hash_block

SIZE = 4


def hashes_of(tokens):
    hashes = []
    PrefixCache(SIZE).extend_hashes(hashes, tokens, len(tokens) // SIZE)
    return hashes


def test_equal_blocks_after_unequal_prefixes_have_unequal_hashes():
    tail = [7, 7, 7, 7]
    assert hashes_of([1, 2, 3, 4, *tail])[1] != hashes_of([1, 2, 3, 5, *tail])[1]
    assert hashes_of([*tail, *tail])[0] != hashes_of([*tail, *tail])[1]


def test_token_ids_are_not_confused_across_their_bytes():
    blocks = [[1, 0], [0, 1], [256, 0], [0, 256], [2**32, 1], [1, 2**32], [1], [1, 0, 0]]
    assert len({hash_block(ROOT_HASH, block) for block in blocks}) == len(blocks)


token_lists = st.lists(st.integers(0, 2), max_size=20)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(token_lists, token_lists)
def test_hashes_are_equal_exactly_where_the_whole_prefixes_are(a, b):
    for i, (hash_a, hash_b) in enumerate(zip(hashes_of(a), hashes_of(b))):
        assert (hash_a == hash_b) == (a[: (i + 1) * SIZE] == b[: (i + 1) * SIZE])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(token_lists, st.lists(st.integers(0, 5)))
def test_hashes_completed_in_steps_are_those_completed_at_once(tokens, steps):
    cache, hashes = PrefixCache(SIZE), []
    for num_blocks in sorted(min(step, len(tokens) // SIZE) for step in steps):
        cache.extend_hashes(hashes, tokens, num_blocks)
    cache.extend_hashes(hashes, tokens, len(tokens) // SIZE)
    assert hashes == hashes_of(tokens)


def cached_chain(num_blocks):
    cache, pool = PrefixCache(SIZE), BlockPool(num_blocks + 1)
    blocks = [pool.pop_free() for _ in range(num_blocks)]
    hashes = hashes_of(list(range(num_blocks * SIZE)))
    for block, block_hash in zip(blocks, hashes):
        cache.insert(block, block_hash)
    return cache, blocks, hashes


def test_match_ends_at_the_first_block_that_is_missing():
    for num_evicted in range(3):
        for gone in itertools.combinations(range(3), num_evicted):
            cache, blocks, hashes = cached_chain(3)
            for i in gone:
                cache.evict(blocks[i])
                assert blocks[i].block_hash is None
            assert cache.match(hashes) == blocks[: min(gone, default=3)]


def test_match_goes_no_further_than_it_is_asked():
    cache, blocks, hashes = cached_chain(3)
    assert cache.match(hashes[:2]) == blocks[:2]
    assert cache.match([]) == []


def test_first_block_of_equal_content_stays_the_cached_one():
    cache, blocks, hashes = cached_chain(2)
    twin = BlockPool(3).pop_free()
    cache.insert(twin, hashes[0])
    assert twin.block_hash is None and cache.match(hashes) == blocks
    cache.evict(twin)  # about to be overwritten: that must not forget the other
    assert cache.match(hashes) == blocks


def test_cleared_cache_matches_nothing_and_marks_no_block():
    cache, blocks, hashes = cached_chain(2)
    cache.clear()
    assert cache.match(hashes) == [] and not any(block.block_hash for block in blocks)
