"""PrefixCache: a hash stands for a whole prefix, and a match is the longest run of blocks that hold it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import prefix_cache
from jpaged.block_pool import BlockPool
from jpaged.cache_spec import CacheSpec
from jpaged.prefix_cache import ROOT_HASH, BlockHash, PrefixCache, hash_block

SIZE = 4
SPEC = CacheSpec(num_blocks=64, block_size=SIZE, max_model_len=64)


def hashes_of(tokens):
    hashes = []
    PrefixCache(SPEC).extend_hashes(hashes, tokens, len(tokens) // SIZE)
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
    cache, hashes = PrefixCache(SPEC), []
    for num_blocks in sorted(min(step, len(tokens) // SIZE) for step in steps):
        cache.extend_hashes(hashes, tokens, num_blocks)
    cache.extend_hashes(hashes, tokens, len(tokens) // SIZE)
    assert hashes == hashes_of(tokens)


def cached_chain(num_blocks):
    cache, pool = PrefixCache(SPEC), BlockPool(num_blocks + 1)
    blocks = [pool.pop_free() for _ in range(num_blocks)]
    hashes = hashes_of(list(range(num_blocks * SIZE)))
    for i, block in enumerate(blocks):
        cache.insert(block, 0, hashes, i)
    return cache, blocks, hashes


def test_match_ends_at_the_first_block_that_is_missing():
    for num_evicted in range(3):
        for gone in itertools.combinations(range(3), num_evicted):
            cache, blocks, hashes = cached_chain(3)
            for i in gone:
                cache.evict(blocks[i])
                assert blocks[i].block_hash is None
            assert cache.match(hashes, 3) == blocks[: min(gone, default=3)]


def test_match_goes_no_further_than_it_is_asked():
    cache, blocks, hashes = cached_chain(3)
    assert cache.match(hashes, 2) == blocks[:2]
    assert cache.match([], 0) == []


def test_first_block_of_equal_content_stays_the_cached_one():
    cache, blocks, hashes = cached_chain(2)
    twin = BlockPool(3).pop_free()
    cache.insert(twin, 0, hashes, 0)
    assert twin.block_hash is None and cache.match(hashes, 2) == blocks
    cache.evict(twin)  # about to be overwritten: that must not forget the other
    assert cache.match(hashes, 2) == blocks


def test_cleared_cache_matches_nothing_and_marks_no_block():
    cache, blocks, hashes = cached_chain(2)
    cache.clear()
    assert cache.match(hashes, 2) == [] and not any(block.block_hash for block in blocks)


def test_clearing_spares_what_is_to_be_kept():
    cache, blocks, hashes = cached_chain(3)
    cache.clear(keep=blocks[:2])
    assert cache.match(hashes, 3) == blocks[:2] and blocks[2].block_hash is None


def test_prefixes_of_different_keys_are_kept_apart():
    def hashes_with(*keys):
        hashes = []
        PrefixCache(SPEC).extend_hashes(hashes, list(range(8)), 2, keys)
        return hashes

    kinds = [
        hashes_with(),
        hashes_with("a"),
        hashes_with("b"),
        hashes_with("a", "b"),
        hashes_with("ab"),
        hashes_with(""),
    ]
    assert len({block_hash for hashes in kinds for block_hash in hashes}) == 2 * len(kinds)
    assert hashes_with("a") == hashes_with("a")


class OneDigest:
    """A sha256 that finds every content under the same digest."""

    def __init__(self, data=b""):
        pass

    def digest(self):
        return bytes(32)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["", "salt"]), token_lists), max_size=6), token_lists)
def test_a_collision_of_digests_never_gives_a_wrong_block(cached, wanted):
    """Where all digests are equal, a match is still exactly the longest common prefix of the same keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache.hashlib, "sha256", OneDigest)
        cache, pool, content = PrefixCache(SPEC), BlockPool(64), {}
        for salt, tokens in cached:
            hashes, num_blocks = [], len(tokens) // SIZE
            cache.extend_hashes(hashes, tokens, num_blocks, (salt,))
            for i in range(num_blocks):
                block = pool.pop_free()
                content[block] = salt, tokens[: (i + 1) * SIZE]
                cache.insert(block, 0, hashes, i)
        hashes, num_blocks = [], len(wanted) // SIZE
        cache.extend_hashes(hashes, wanted, num_blocks, ("salt",))
        matched = cache.match(hashes, num_blocks)
        assert len({h.digest for h in cache.blocks}) <= 1
    prefixes = [("salt", wanted[: (i + 1) * SIZE]) for i in range(num_blocks)]
    longest = next((i for i, prefix in enumerate(prefixes) if prefix not in content.values()), num_blocks)
    assert [content[block] for block in matched] == prefixes[:longest]


def test_comparing_a_long_prefix_takes_time_in_proportion_to_its_length(monkeypatch):
    """A hit compares each block once, though each of them stands for all before it."""
    num_blocks, visited = 300, []
    cache, pool, tokens = PrefixCache(SPEC), BlockPool(2 * 300 + 1), list(range(300 * SIZE))
    compare = BlockHash.__eq__

    def counted(self, other):
        a, b = self, other
        while a is not b and a.content == b.content:
            visited.append(a)
            a, b = a.parent, b.parent
        return compare(self, other)

    monkeypatch.setattr(BlockHash, "__eq__", counted)
    for _ in range(2):  # the second computes what is cached already, one block a step
        hashes = []
        for i in range(num_blocks):
            cache.extend_hashes(hashes, tokens, i + 1)
            cache.insert(pool.pop_free(), 0, hashes, i)
    hashes = []
    cache.extend_hashes(hashes, tokens, num_blocks)
    assert len(cache.match(hashes, num_blocks)) == num_blocks
    assert num_blocks <= len(visited) <= 4 * num_blocks
