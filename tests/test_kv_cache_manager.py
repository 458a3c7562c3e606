"""KVCacheManager: whatever requests do, every token's KV is where its table says, and nobody overwrites what others share.

The walk is a state machine over (admit, append, fork, write, free, evict, match) beside a model in dictionaries of the
pool's content: slot -> the attention group whose KV was written there, and the tokens up to and with that one. Equal
entries mean equal KV, so a slot is right exactly where its entry is the sequence's own prefix.
"""

import hashlib
from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jpaged.cache_spec import CacheSpec
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.prefix_cache import NO_HIT
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import Sequence
from jpaged.swap_space import CHUNK, SwappedOut
from jpaged.swapping import discard_swapped, swap_in, swap_out

SIZE, MAX_CHUNK = 4, 9


def make_manager(num_blocks, windows=(None,), max_chunk=32, **options):
    spec = CacheSpec(
        num_blocks=num_blocks, block_size=SIZE, max_model_len=64, windows=windows, max_num_batched_tokens=max_chunk
    )
    return KVCacheManager(spec, **options)


def make_sequence(tokens, name="a"):
    return Sequence(name, tokens, SamplingParams(), seed=0, max_tokens=100)


def snapshot(manager, sequences):
    """All that must not change when a call answers None."""
    return (
        [block.block_id for block in manager.pool.free_queue()],
        [(block.ref_count, block.block_hash) for block in manager.pool.blocks],
        {h: [block and block.block_id for block in entry] for h, entry in manager.prefix_cache.blocks.items()},
        [(seq.block_table.block_ids(), seq.num_computed_tokens, seq.swapped) for seq in sequences],
        manager.swap_space.num_used,
    )


class PoolWalk(RuleBasedStateMachine):
    num_steps = 0  # of all walks

    def __init__(self):
        super().__init__()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prompts: list[list[int]] = [[]]
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.num_requests = 0
        self.pinned: list[tuple[int, ...]] = []  # prefixes

    @initialize(
        num_logical=st.integers(4, 11),
        windows=st.sampled_from([(None,), (None,), (None, 5), (3,), (None, 6, 9)]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_host_blocks=st.sampled_from([0, CHUNK, 3 * CHUNK]),
    )
    def start(self, num_logical, windows, enable_prefix_caching, num_host_blocks):
        num_needed = make_manager(2, windows, MAX_CHUNK).spec.num_blocks_for(num_logical * SIZE)
        self.manager = make_manager(
            1 + num_needed, windows, MAX_CHUNK,
            enable_prefix_caching=enable_prefix_caching, num_host_blocks=num_host_blocks,
        )  # fmt: skip

    @property
    def windows(self):
        return self.manager.spec.windows

    def sees(self, window, num_tokens, i):
        """Whether tokens after num_tokens tokens see anything of logical block i."""
        return window is None or (i + 1) * SIZE > num_tokens + 1 - window

    def entries_seen(self, num_tokens, logical):
        """The entries of those logical blocks that the tokens after num_tokens tokens see."""
        groups = list(enumerate(self.windows))
        return [i * len(groups) + g for i in logical for g, window in groups if self.sees(window, num_tokens, i)]

    @property
    def sequences(self):
        return [*self.running, *self.waiting]

    def free_ids(self):
        return {block.block_id for block in self.manager.pool.free_queue()}

    def cached_blocks(self):
        cached = self.manager.prefix_cache.blocks
        return [(content, block) for content, entry in cached.items() for block in entry if block is not None]

    def cached_prefixes(self):
        """The groups and whole prefixes that blocks of the cache hold, by content."""
        return {self.content[block.block_id * SIZE + SIZE - 1] for _, block in self.cached_blocks()}

    def longest_match(self, seq):
        cached = self.cached_prefixes()
        for num_blocks in range((seq.num_tokens - 1) // SIZE, 0, -1):
            entries = self.entries_seen(num_blocks * SIZE, range(num_blocks))
            wanted = [divmod(entry, len(self.windows)) for entry in entries]
            if all((group, tuple(seq.token_ids[: (i + 1) * SIZE])) in cached for i, group in wanted):
                return num_blocks
        return 0

    def copy_blocks(self):
        """The device's first part of a step."""
        copies = self.manager.take_copies()
        held = {slot: tokens for slot, tokens in self.content.items()}
        for copy in copies:
            assert copy.seq.num_computed_tokens % SIZE, f"{copy.seq} copies a full block, or one that it does not write"
            assert copy.seq.block_table.blocks[copy.index] is copy.destination
            for offset in range(SIZE):
                source, destination = copy.source.block_id * SIZE + offset, copy.destination.block_id * SIZE + offset
                self.content[destination] = held.get(source, ())
        return copies

    def compute(self, seq, num_tokens):
        """The device's part of a step: reads all before, writes num_tokens."""
        self.copy_blocks()
        self.write(seq, num_tokens)

    def write(self, seq, num_tokens):
        computed, num_groups = seq.num_computed_tokens, len(self.windows)
        for group, window in enumerate(self.windows):
            for position in range(computed + num_tokens):
                block = seq.block_table.blocks[position // SIZE * num_groups + group]
                slot, held = block.block_id * SIZE + position % SIZE, (group, tuple(seq.token_ids[: position + 1]))
                if position >= computed:
                    assert block.block_id != 0 and block.ref_count == 1, f"{seq} writes {block}"
                    assert block.block_hash is None, f"{seq} writes {block}, which others may find"
                    self.content[slot] = held
                elif window is None or position > computed - window:
                    assert self.content[slot] == held, f"{seq} reads foreign KV at {position}"
        seq.num_computed_tokens += num_tokens
        self.manager.mark_computed(seq, computed, seq.num_computed_tokens)

    @rule(
        which=st.integers(0, 99), shared=st.integers(0, 16), tail=st.lists(st.integers(0, 1), min_size=1, max_size=10)
    )
    def arrive(self, which, shared, tail):
        prompt = (self.prompts[which % len(self.prompts)][:shared] + tail)[:20]
        if self.manager.spec.num_blocks_for(len(prompt) + 1) > self.manager.spec.num_usable_blocks:
            return  # refused at admission to the engine
        self.prompts.append(prompt)
        self.num_requests += 1
        self.waiting.append(make_sequence(prompt, str(self.num_requests)))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99), share=st.floats(0, 1), reserve=st.sampled_from([0, 0, 1, 3]))
    def admit(self, which, share, reserve):
        seq = self.waiting[which % len(self.waiting)]
        hit, swapped = self.manager.match_prefix(seq), seq.swapped
        num_matched = hit.num_tokens // SIZE
        assert num_matched == (self.longest_match(seq) if self.manager.enable_prefix_caching else 0)
        tails = [prefix for prefix in self.pinned if len(prefix) // SIZE == num_matched and len(prefix) % SIZE]
        tails = [len(prefix) for prefix in tails if tuple(seq.token_ids[:-1])[: len(prefix)] == prefix]
        assert hit.num_tokens == max(tails, default=num_matched * SIZE) or swapped is not None
        assert len(hit.entries) == len(self.windows) * -(-hit.num_tokens // SIZE)

        found, num_hit = self.manager.num_tokens_found(seq, hit), hit.num_tokens
        if swapped is None or num_matched < swapped.first_block:
            assert found == num_hit
        else:
            assert found == max(num_hit, swapped.num_computed_tokens)
        missing = seq.num_tokens - found
        num_new = min(max(1, round(share * missing)), MAX_CHUNK)
        num_free, spec = len(self.free_ids()), self.manager.spec
        num_taken = len(self.free_ids() & {block.block_id for block in hit.entries})
        num_taken += spec.num_blocks_for(seq.num_tokens - num_matched * SIZE)
        fits_cold = spec.num_blocks_for(seq.num_tokens) + reserve <= num_free
        fits = fits_cold or num_taken + reserve <= num_free
        before = snapshot(self.manager, self.sequences)
        got = self.manager.admit(seq, hit, num_new, reserve=reserve)
        assert (got is not None) == fits
        if got is None:
            assert snapshot(self.manager, self.sequences) == before
            return
        self.waiting.remove(seq)
        self.running.append(seq)
        assert seq.num_computed_tokens == found < seq.num_tokens
        num_kept = num_matched * len(self.windows)  # a partly filled block that is shared is copied
        added = seq.block_table.blocks[num_kept:]
        null_block = self.manager.pool.null_block  # stands where the windows of what comes back have passed the hit
        kept = zip(seq.block_table.blocks, hit.entries[:num_kept])
        assert all(held is entry or (held is null_block and found > num_hit) for held, entry in kept)
        assert [block for block in added if block.block_id] == got
        num_groups, table = len(self.windows), seq.block_table.blocks
        seen = self.entries_seen(found, range(len(table) // num_groups))
        assert {i for i, block in enumerate(table) if block.block_id} == set(seen), "a block that nobody sees is held"
        copy = swap_in(self.manager, seq, hit)
        assert (copy is not None) == (found > num_hit) and seq.swapped is None
        if copy is not None:
            for block_id, slots in zip(copy.block_ids, copy.content, strict=True):
                self.content.update((block_id * SIZE + i, held) for i, held in enumerate(slots) if block_id)
        self.compute(seq, num_new)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), most=st.integers(1, MAX_CHUNK), token=st.integers(0, 1))
    def advance(self, which, most, token):
        """A chunk of a prompt, or a decode; the last token of either yields the next."""
        seq = self.running[which % len(self.running)]
        num_tokens = min(most, seq.num_tokens - seq.num_computed_tokens)
        num_groups, computed = len(self.windows), seq.num_computed_tokens
        logical = range(len(seq.block_table) // num_groups, -(-(computed + num_tokens) // SIZE))
        num_needed = len(self.entries_seen(computed, logical))
        num_needed += sum(block.ref_count > 1 for block in seq.block_table.blocks[computed // SIZE * num_groups :])
        num_free, before = len(self.free_ids()), snapshot(self.manager, self.sequences)
        got = self.manager.allocate_slots(seq, num_tokens)
        assert (got is not None) == (num_needed <= num_free) or self.manager.has_windows
        if got is None:
            assert num_needed > len(self.free_ids()), "what no window sees any more would have been enough"
            assert snapshot(self.manager, self.sequences) == before or self.manager.has_windows
            victim = self.running.pop()
            self.manager.free(victim)
            self.waiting.append(victim)
            return
        self.compute(seq, num_tokens)
        if seq.num_computed_tokens == seq.num_tokens:
            if seq.num_tokens >= 24:
                self.running.remove(seq)
                self.manager.free(seq)
            else:
                seq.append(token)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), at=st.integers(0, 99), token=st.integers(0, 1))
    def fork(self, which, at, token):
        """A child goes on from all that its parent has computed, or from some of its full blocks."""
        parent = self.running[which % len(self.running)]
        points, blocks = (
            [*range(0, parent.num_computed_tokens, SIZE), parent.num_computed_tokens],
            parent.block_table.blocks,
        )
        points = [n for n in points if all(blocks[i].block_id for i in self.entries_seen(n, range(-(-n // SIZE))))]
        num_tokens = points[-1] if at % 2 else points[at % len(points)]
        child = parent.fork(1)
        child.token_ids[num_tokens:] = [token]
        del child.block_hashes[num_tokens // SIZE :]
        num_free = len(self.free_ids())
        self.manager.fork(parent, child, num_tokens)
        assert len(self.free_ids()) == num_free, "a fork takes no block"
        assert child.block_table.blocks == blocks[: -(-num_tokens // SIZE) * len(self.windows)]
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(how_many=st.integers(2, 9), leaves=st.integers(0, 40), token=st.integers(0, 1))
    def decode_together(self, how_many, leaves, token):
        """One token each in one step, with all their copies at once; one that was planned may leave before it runs."""
        tables = [seq.block_table for seq in self.running] + self.manager.pinned.tables
        sharing = Counter(block for table in tables for block in table.blocks)
        planned = []
        for seq in self.running[-how_many:]:
            if seq.num_computed_tokens == seq.num_tokens or seq.num_tokens > 30:
                continue
            if self.manager.allocate_slots(seq, 1) is not None:
                planned.append(seq)
        if leaves < len(planned):
            gone = planned.pop(leaves)
            self.running.remove(gone)
            self.manager.free(gone)
            self.manager.check_invariants(self.sequences)
        copied = Counter(copy.source for copy in self.copy_blocks())
        for block, times in copied.items():
            assert times < sharing[block], f"the last to hold {block} copied it too"
        for seq in planned:
            self.write(seq, 1)
            if seq.num_computed_tokens == seq.num_tokens:
                seq.append(token)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), comes_back=st.booleans())
    def leave(self, which, comes_back):
        seq = self.running.pop(which % len(self.running))
        num_used = self.manager.pool.num_used
        num_own = sum(block.ref_count == 1 for block in seq.block_table.blocks)
        self.manager.free(seq)
        assert self.manager.pool.num_used == num_used - num_own
        assert (seq.num_computed_tokens, len(seq.block_table)) == (0, 0)
        if comes_back:
            self.waiting.append(seq)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def swap_out(self, which, token):
        seq = self.running[which % len(self.running)]
        if seq.num_computed_tokens == seq.num_tokens:
            seq.append(token)
        table, num_computed = list(seq.block_table.blocks), seq.num_computed_tokens
        before, num_used = snapshot(self.manager, self.sequences), self.manager.swap_space.num_used
        if not swap_out(self.manager, seq):
            assert snapshot(self.manager, self.sequences) == before
            num_entries = len(self.windows) * -(-num_computed // SIZE)
            assert num_used + num_entries > self.manager.swap_space.capacity - CHUNK
            return
        self.running.remove(seq)
        self.waiting.append(seq)
        first, ids = seq.swapped.first_block, seq.swapped.block_ids
        copied = self.entries_seen(num_computed, range(first, -(-num_computed // SIZE)))
        assert ids == [table[i].block_id for i in copied] and not (first and self.manager.has_windows)
        assert all(block.ref_count > 0 for block in table[:first]), "a block that nobody holds was not copied"
        seq.swapped.content = [[self.content.get(i * SIZE + offset) for offset in range(SIZE)] for i in ids]

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99), how_rare=st.integers(0, 3))
    def give_up_waiting(self, which, how_rare):
        if how_rare:
            return
        seq = self.waiting.pop(which % len(self.waiting))
        num_used, own = self.manager.swap_space.num_used, seq.swapped.num_host_blocks if seq.swapped else 0
        discard_swapped(self.manager, seq)
        assert self.manager.swap_space.num_used == num_used - own

    @rule(how_rare=st.integers(0, 9))
    def reset(self, how_rare):
        if how_rare:
            return
        num_pinned = len(self.manager.pinned.blocks)
        is_used = self.manager.pool.num_used > num_pinned or self.manager.swap_space.num_used > 0
        before = snapshot(self.manager, self.sequences)
        assert self.manager.reset_prefix_cache() == (not is_used)
        assert (
            snapshot(self.manager, self.sequences) == before
            if is_used
            else {block for _, block in self.cached_blocks()} <= self.manager.pinned.blocks
        )

    @precondition(lambda self: self.running and self.manager.enable_prefix_caching)
    @rule(which=st.integers(0, 99), how_rare=st.integers(0, 5))
    def pin(self, which, how_rare):
        seq = self.running[which % len(self.running)]
        prefix = tuple(seq.token_ids[: seq.num_computed_tokens])
        if how_rare or not prefix or prefix in self.pinned:
            return
        table = self.manager.pinned.hold_tail(seq)
        if len(prefix) % 3 == 0:  # as if it had failed
            self.manager.pinned.unpin(table)
            return
        self.manager.pinned.pin(table, list(prefix))
        if len(table) == len(self.entries_seen(len(prefix) // SIZE * SIZE, range(-(-len(prefix) // SIZE)))):
            self.pinned.append(prefix)  # all of it was still findable
        num_full = len(table) - (len(prefix) % SIZE > 0)  # fewer than the prefix has where some were lost
        for block in table.blocks[:num_full] if not self.manager.has_windows else ():
            assert (
                self.content[block.block_id * SIZE + SIZE - 1][1]
                == prefix[: len(self.content[block.block_id * SIZE + SIZE - 1][1])]
            )

    @rule(how_rare=st.integers(0, 9))
    def lose_the_pool(self, how_rare):
        if how_rare:
            return
        for seq in self.running:
            self.manager.free(seq)
        self.waiting += self.running
        self.running.clear()
        for seq in self.waiting:
            discard_swapped(self.manager, seq)
        self.manager.forget()
        self.pinned.clear()
        assert self.manager.pool.num_used == 0 and all(self.manager.match_prefix(seq) == NO_HIT for seq in self.waiting)

    @invariant()
    def pool_is_sound(self):
        if not hasattr(self, "manager"):
            return
        PoolWalk.num_steps += 1
        self.manager.check_invariants(self.sequences)
        for block_hash, block in self.cached_blocks():
            group, tokens = self.content[block.block_id * SIZE + SIZE - 1]
            assert self.manager.prefix_cache.blocks[block_hash][group] is block
            assert len(tokens) % SIZE == 0
            expected = bytes(32)
            for i in range(0, len(tokens), SIZE):
                expected = hashlib.sha256(expected + array("q", tokens[i : i + SIZE]).tobytes()).digest()
            assert block_hash.digest == expected, f"{block} is found under a hash that is not its content's"
            for offset in range(SIZE):
                held = self.content[block.block_id * SIZE + offset]
                mixed = f"{block} holds mixed content"
                assert held == (group, tokens[: len(tokens) - SIZE + 1 + offset]), mixed

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for seq in self.running:
            self.manager.free(seq)
        for seq in self.waiting:
            discard_swapped(self.manager, seq)
        self.manager.check_invariants(self.sequences)
        assert self.manager.swap_space.num_used == 0
        assert self.manager.pool.num_used == len(self.manager.pinned.blocks)


@pytest.mark.parametrize(
    "num_steps", [5_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_any_walk_of_requests_keeps_the_pool_sound(num_steps):
    before = PoolWalk.num_steps
    run_state_machine_as_test(
        PoolWalk,
        settings=settings(
            max_examples=num_steps // 40, stateful_step_count=60, derandomize=True, deadline=None, database=None
        ),
    )
    assert PoolWalk.num_steps - before >= num_steps


def run_prompt(manager, tokens, name="a"):
    """Admits a sequence and computes its prompt at once; returns it with the number of tokens found in the cache."""
    seq = make_sequence(tokens, name)
    hit = manager.match_prefix(seq)
    assert manager.admit(seq, hit, seq.num_tokens - hit.num_tokens) is not None
    before = seq.num_computed_tokens
    seq.num_computed_tokens = seq.num_tokens
    manager.mark_computed(seq, before, seq.num_computed_tokens)
    return seq, before


@pytest.mark.parametrize("num_tokens, num_hit", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_hit_never_covers_the_last_token(num_tokens, num_hit):
    manager, prompt = make_manager(20), list(range(num_tokens))
    run_prompt(manager, prompt)
    assert run_prompt(manager, prompt, "b")[1] == num_hit


def test_running_sequence_shares_its_blocks_with_one_that_starts_alike():
    manager = make_manager(20)
    first, _ = run_prompt(manager, [1] * 9)
    second, _ = run_prompt(manager, [1] * 8 + [2])
    assert second.block_table.block_ids()[:2] == first.block_table.block_ids()[:2]
    assert [block.ref_count for block in second.block_table.blocks] == [2, 2, 1]
    assert manager.pool.num_used == 4
    assert manager.usage == 4 / 19


def test_finished_sequence_leaves_its_prefix_findable_until_the_blocks_are_needed():
    manager = make_manager(5)
    seq, _ = run_prompt(manager, list(range(9)))
    manager.free(seq)
    other, _ = run_prompt(manager, [50, 51, 52, 53])  # takes the block that was never used, then gives it back
    manager.free(other)
    again, num_hit = run_prompt(manager, list(range(9)), "b")
    assert num_hit == 8
    manager.free(again)
    run_prompt(manager, list(range(100, 116)), "c")  # takes all four
    assert manager.match_prefix(make_sequence(list(range(9)))) == NO_HIT


def test_continuation_is_given_up_before_its_prefix():
    manager = make_manager(5)
    seq, _ = run_prompt(manager, list(range(16)))
    manager.free(seq)
    run_prompt(manager, [90] * 5, "b")  # takes two of the four
    assert manager.match_prefix(make_sequence(list(range(16)) + [0])).num_tokens == 2 * SIZE


def test_matched_blocks_that_wait_in_the_free_queue_are_not_counted_as_free():
    manager = make_manager(5)  # four usable
    seq, _ = run_prompt(manager, list(range(8)))
    manager.free(seq)
    late = make_sequence(list(range(8)) + [1] * 9)  # five blocks, two of them cached: three are needed, two are left
    assert manager.admit(late, manager.match_prefix(late), 1) is None
    fitting = make_sequence(list(range(8)) + [1] * 8)
    assert manager.admit(fitting, manager.match_prefix(fitting), 1) is not None


def test_sequence_is_admitted_only_where_all_of_it_fits_now():
    manager = make_manager(4)
    assert manager.admit(make_sequence([1] * 13), NO_HIT, 1) is None
    assert manager.admit(make_sequence([1] * 12), NO_HIT, 1) is not None
    assert manager.pool.num_used == 1  # slots are taken only for the tokens of this step


def test_slots_within_the_last_block_cost_no_new_block():
    manager = make_manager(4)
    seq = make_sequence([1] * 3)
    assert len(manager.admit(seq, NO_HIT, 3)) == 1
    seq.num_computed_tokens = 3
    seq.append(1)
    assert manager.allocate_slots(seq, 1) == []
    seq.num_computed_tokens = 4
    seq.append(1)
    assert len(manager.allocate_slots(seq, 1)) == 1


def test_without_prefix_caching_nothing_is_ever_shared():
    manager = make_manager(20, enable_prefix_caching=False)
    run_prompt(manager, [1] * 9)
    assert run_prompt(manager, [1] * 9)[1] == 0
    assert manager.pool.num_used == 6 and not manager.prefix_cache.blocks


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda m, seq: m.pool.release([seq.block_table.blocks[0]]), "tables"),
        (lambda m, seq: m.pool.acquire(seq.block_table.blocks[0]), "tables"),
        (lambda m, seq: seq.block_table.blocks.pop(), "tables"),
        (lambda m, seq: setattr(seq, "num_computed_tokens", 13), "outside its blocks"),
        (lambda m, seq: setattr(seq.block_table.blocks[0], "block_hash", b"other"), "another hash"),
        (lambda m, seq: setattr(m.pool.blocks[9], "block_hash", b"stale"), None),
        (lambda m, seq: setattr(m.pool, "num_free", 3), None),
        (lambda m, seq: setattr(m.swap_space, "num_used", CHUNK), None),
        (lambda m, seq: setattr(seq, "swapped", SwappedOut(0, 4, [])), "both swapped out and in the pool"),
    ],
)
def test_invariant_check_finds_damage(damage, message):
    manager = make_manager(12)
    seq, _ = run_prompt(manager, [1] * 12)
    manager.check_invariants([seq])
    damage(manager, seq)
    with pytest.raises(AssertionError, match=message):
        manager.check_invariants([seq])


def fork(manager, parent, tokens):
    child = parent.fork(1)
    child.token_ids += tokens
    manager.fork(parent, child, parent.num_computed_tokens)
    return child


def test_the_first_write_into_a_shared_block_copies_it_once_and_the_last_owner_writes_in_place():
    manager = make_manager(20)
    parent, _ = run_prompt(manager, [1] * 6)
    children = [fork(manager, parent, [token]) for token in (2, 3)]
    shared = parent.block_table.blocks[1]
    assert shared.ref_count == 3 and manager.pool.num_used == 2
    parent.append(4)
    for seq in (parent, children[0]):
        (new,) = manager.allocate_slots(seq, 1)
        assert seq.block_table.blocks[1] is new and manager.allocate_slots(seq, 1) == []
    assert manager.allocate_slots(children[1], 1) == [] and children[1].block_table.blocks[1] is shared
    assert [(copy.source, copy.seq) for copy in manager.take_copies()] == [(shared, parent), (shared, children[0])]
    assert manager.take_copies() == [] and manager.pool.num_used == 4
    assert parent.block_table.blocks[0].ref_count == 3


def test_full_blocks_are_shared_and_never_copied():
    manager = make_manager(20)
    parent, _ = run_prompt(manager, [1] * 8)
    child = fork(manager, parent, [2])
    assert len(manager.allocate_slots(child, 1)) == 1
    assert manager.take_copies() == [] and child.block_table.block_ids()[:2] == parent.block_table.block_ids()


def test_a_copy_for_which_there_is_no_block_is_not_begun():
    manager = make_manager(3)
    parent, _ = run_prompt(manager, [1] * 6)
    child = fork(manager, parent, [2])
    before = snapshot(manager, [parent, child])
    assert manager.allocate_slots(child, 1) is None
    assert snapshot(manager, [parent, child]) == before and manager.take_copies() == []


def test_the_source_of_a_copy_to_come_is_not_given_away():
    """Also where all that held it are gone by then."""
    manager = make_manager(4)
    parent, _ = run_prompt(manager, [1] * 6)
    child = fork(manager, parent, [2])
    shared = parent.block_table.blocks[1]
    assert len(manager.allocate_slots(child, 1)) == 1
    manager.free(parent)
    manager.check_invariants([child])
    other = make_sequence([7] * 9, "b")
    assert manager.allocate_slots(other, 1) is None
    assert [copy.source for copy in manager.take_copies()] == [shared]
    assert manager.allocate_slots(other, 1) == [shared]


def test_a_copy_to_come_goes_with_its_sequence():
    manager = make_manager(6)
    parent, _ = run_prompt(manager, [1] * 6)
    child = fork(manager, parent, [2])
    manager.allocate_slots(child, 1)
    manager.free(child)
    manager.check_invariants([parent])
    assert manager.take_copies() == [] and parent.block_table.blocks[1].ref_count == 1


def test_a_fork_in_the_middle_of_a_block_is_refused():
    manager = make_manager(20)
    parent, _ = run_prompt(manager, [1] * 7)
    with pytest.raises(AssertionError):
        manager.fork(parent, parent.fork(1), 6)


def test_invariant_check_finds_a_sequence_about_to_write_a_cached_block():
    manager = make_manager(12)
    first, _ = run_prompt(manager, [1] * 9)
    second, _ = run_prompt(manager, [1] * 9)
    manager.check_invariants([first, second])
    second.num_computed_tokens = 7
    with pytest.raises(AssertionError, match="would write"):
        manager.check_invariants([first, second])


def swapped_sequence(manager, tokens):
    seq, _ = run_prompt(manager, tokens)
    seq.append(7)
    assert swap_out(manager, seq)
    return seq


def test_host_memory_is_counted_in_chunks_and_never_exceeded():
    manager = make_manager(40, num_host_blocks=2 * CHUNK + 1)
    first = swapped_sequence(manager, [1] * SIZE)
    second = swapped_sequence(manager, [2] * SIZE * CHUNK)
    third, _ = run_prompt(manager, [3])
    third.append(7)
    assert manager.swap_space.num_used == 2 * CHUNK and not swap_out(manager, third)
    assert third.swapped is None and len(third.block_table) == 1
    discard_swapped(manager, first)
    discard_swapped(manager, first)
    assert manager.swap_space.num_used == CHUNK and swap_out(manager, third)
    manager.check_invariants([first, second, third])


def test_a_shared_prefix_stays_and_is_found_when_its_sequence_comes_back():
    manager = make_manager(20, num_host_blocks=CHUNK)
    keeper, _ = run_prompt(manager, [1] * 9)
    seq, _ = run_prompt(manager, [1] * 8 + [2] * 5)
    seq.append(7)
    own = seq.block_table.block_ids()[2:]
    assert swap_out(manager, seq)
    assert (seq.swapped.first_block, seq.swapped.block_ids, seq.swapped.num_computed_tokens) == (2, own, 13)
    hit = manager.match_prefix(seq)
    assert manager.num_tokens_found(seq, hit) == 13
    manager.admit(seq, hit, 1)
    copy = swap_in(manager, seq, hit)
    assert seq.block_table.blocks[:2] == keeper.block_table.blocks[:2]
    num_matched = len(hit.entries)
    assert copy.block_ids == [0] * (num_matched - 2) + seq.block_table.block_ids()[num_matched:4]
    manager.check_invariants([keeper, seq])


def test_a_sequence_whose_shared_prefix_is_gone_is_recomputed():
    manager = make_manager(7, num_host_blocks=CHUNK)
    keeper, _ = run_prompt(manager, [1] * 9)
    seq, _ = run_prompt(manager, [1] * 8 + [2] * 5)
    seq.append(7)
    assert swap_out(manager, seq) and seq.swapped.first_block == 2
    manager.free(keeper)
    other, _ = run_prompt(manager, [9] * 24)
    manager.free(other)
    hit = manager.match_prefix(seq)
    assert hit == NO_HIT and manager.num_tokens_found(seq, hit) == 0
    manager.admit(seq, hit, 14)
    assert swap_in(manager, seq, hit) is None and seq.swapped is None and manager.swap_space.num_used == 0


def pin(manager, tokens):
    seq, _ = run_prompt(manager, tokens, "pin")
    table = manager.pinned.hold_tail(seq)
    manager.free(seq)
    manager.pinned.pin(table, tokens)
    return table


@pytest.mark.parametrize("num_pinned", [3, 4, 6, 8])
def test_who_goes_on_from_a_pinned_prefix_copies_its_partly_filled_block_and_no_other(num_pinned):
    manager, prefix = make_manager(20), list(range(num_pinned))
    table = pin(manager, prefix)
    readers = [make_sequence(prefix + [90 + i, 7], str(i)) for i in range(2)]
    for reader in readers:
        hit = manager.match_prefix(reader)
        assert hit == (table.blocks, num_pinned)
        manager.admit(reader, hit, 2)
        manager.check_invariants(readers)
    copies = manager.take_copies()
    assert [copy.source for copy in copies] == table.blocks[num_pinned // SIZE :] * 2
    for reader in readers:
        num_full = num_pinned // SIZE
        assert reader.block_table.blocks[:num_full] == table.blocks[:num_full]
        assert not set(reader.block_table.blocks[num_full:]) & set(table.blocks)
        manager.free(reader)
    assert set(manager.pinned.blocks) == set(table.blocks) and manager.pool.num_used == len(table)


def test_a_pinned_prefix_is_no_hit_for_itself_nor_for_who_leaves_it_early():
    manager, prefix = make_manager(20), list(range(6))
    pin(manager, prefix)
    for tokens in (prefix, prefix[:5] + [77, 78]):
        assert manager.match_prefix(make_sequence(tokens)).num_tokens == SIZE
    salted = Sequence("s", prefix + [1], SamplingParams(cache_salt="tenant"), seed=0, max_tokens=1)
    assert manager.match_prefix(salted) == NO_HIT


def test_of_two_pinned_prefixes_the_longer_that_fits_is_taken():
    manager = make_manager(20)
    short, long = pin(manager, [1, 2, 3, 4, 5]), pin(manager, [1, 2, 3, 4, 5, 6])
    assert short.blocks[0] is long.blocks[0] and short.blocks[1] is not long.blocks[1]
    for tokens, table in (([1, 2, 3, 4, 5, 6, 7], long), ([1, 2, 3, 4, 5, 9, 9], short)):
        assert manager.match_prefix(make_sequence(tokens)).entries == table.blocks


def test_a_hit_that_the_windows_of_a_swapped_sequence_have_passed_is_not_held():
    manager = make_manager(20, windows=(3,), num_host_blocks=CHUNK)
    seq = swapped_sequence(manager, list(range(13)))
    manager.prefix_cache.evict(manager.prefix_cache.blocks[seq.block_hashes[2]][0])
    hit = manager.match_prefix(seq)
    assert (hit.num_tokens, manager.num_tokens_found(seq, hit)) == (2 * SIZE, 13)
    manager.admit(seq, hit, 1)
    assert [block.block_id > 0 for block in seq.block_table.blocks] == [False, False, True, True]
    swap_in(manager, seq, hit)
    manager.check_invariants([seq])
