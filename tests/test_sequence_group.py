"""SequenceGroup: samples of one request come and go together, share all that they can, and nobody reads foreign KV.

`GroupWalk` drives a scheduler without a model, beside a model of the pool's content: slot -> the tokens up to and with
the one whose KV was written there.
"""

import random

import pytest
from test_scheduler import VOCAB_SIZE, Walk, make, request

from jpaged.cache_spec import CacheSpec
from jpaged.preemption import Preemption
from jpaged.scheduler import Scheduler
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence, SequenceStatus
from jpaged.sequence_group import SequenceGroup
from jpaged.swap_space import CHUNK, SwappedGroup
from jpaged.swapping import swap_in_group, swap_out_group


def token_at(seq: Sequence, position: int) -> int:
    """Samples of every third request are equal, as greedy ones are."""
    index = seq.index if int(seq.request_id) % 3 else 0
    return hash((int(seq.request_id), index, position)) % VOCAB_SIZE


def tokens_of(plan: SchedulerOutput) -> list[list[int]]:
    ahead = range(max(plan.limits, default=0))
    return [[token_at(seq, seq.num_tokens + i) for i in ahead] for seq in plan.sampled]


def group_of(first: Sequence, num_sequences: int) -> list[Sequence]:
    return SequenceGroup(first, num_sequences).sequences if num_sequences > 1 else [first]


class Device:
    """Does what plans say, and looks that every token attends to its own past."""

    def __init__(self, spec: CacheSpec):
        self.block_size, self.windows = spec.block_size, spec.windows
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}  # group and tokens
        self.num_copies = self.num_groups_swapped_in = 0

    def run(self, plan: SchedulerOutput) -> None:
        self._swap(plan)
        self._copy(plan)
        for (seq, num_tokens), start in zip(plan.num_scheduled_tokens.items(), plan.starts, strict=True):
            tokens = seq.token_ids + [token_at(seq, p) for p in range(seq.num_tokens, start + num_tokens)]
            limit = dict(zip(plan.sampled, plan.limits)).get(seq, 1)
            tokens += [token_at(seq, p) for p in range(len(tokens), start + num_tokens + limit)]
            for group, window in enumerate(self.windows):
                for position in range(start + num_tokens + limit - 1):
                    slot = seq.block_table.slot(position, self.block_size, group, len(self.windows))
                    held = group, tuple(tokens[: position + 1])
                    if position >= start:
                        assert slot >= self.block_size, "the null block is written"
                        self.content[slot] = held
                    elif window is None or position > start - window:
                        assert self.content[slot] == held, f"{seq} reads foreign KV at {position}"

    def _swap(self, plan: SchedulerOutput) -> None:
        def slots(block_id: int) -> range:
            return range(block_id * self.block_size, (block_id + 1) * self.block_size)

        for swapped in plan.swapped_out:
            assert len(set(swapped.block_ids)) == len(swapped.block_ids) and 0 not in swapped.block_ids
            swapped.content = [[self.content.get(slot, ()) for slot in slots(i)] for i in swapped.block_ids]
        for swapped in plan.swapped_in:
            self.num_groups_swapped_in += isinstance(swapped, SwappedGroup)
            for block_id, held in zip(swapped.block_ids, swapped.content, strict=True):
                if block_id:
                    self.content.update(zip(slots(block_id), held))

    def _copy(self, plan: SchedulerOutput) -> None:
        sources = [copy.source.block_id for copy in plan.copies]
        destinations = [copy.destination.block_id for copy in plan.copies]
        assert len(set(destinations)) == len(destinations) and set(destinations).isdisjoint(sources)
        self.num_copies += len(sources)
        held = dict(self.content)
        for copy in plan.copies:
            assert copy.seq in plan.num_scheduled_tokens
            start = plan.starts[list(plan.num_scheduled_tokens).index(copy.seq)]
            index = copy.index // len(self.windows)
            assert start % self.block_size and start // self.block_size == index, "a full block is copied"
            for offset in range(self.block_size):
                source = copy.source.block_id * self.block_size + offset
                self.content[copy.destination.block_id * self.block_size + offset] = held.get(source, ())


class GroupWalk(Walk):
    """Requests of one to four samples; each sequence is in `requests`."""

    def __init__(self, seed: int, max_in_flight: int = 0, num_steps: int = 1, mode: str = "recompute"):
        super().__init__(seed, max_in_flight, num_steps)
        self.scheduler.preemption = Preemption(mode)
        self.scheduler.kv.swap_space.capacity = self.rng.choice([2 * CHUNK, 1000])
        self.device = Device(self.spec)
        self.num_groups_back = 0

    def run(self, num_requests: int, abort_rate: float = 0.03):
        scheduler, rng, numbers = self.scheduler, self.rng, iter(range(num_requests))
        is_over = False
        for _ in range(200 * num_requests):
            for _ in range(rng.choice([0, 0, 0, 1, 3])):
                number = next(numbers, None)
                is_over = number is None
                if number is not None:
                    self.add_request(number)
            if rng.random() < abort_rate and self.requests:
                group = rng.choice(self.requests).group
                for seq in group.sequences if group else []:
                    scheduler.finish(seq, FinishReason.ABORT)
            plan = scheduler.schedule()
            if plan is not None:
                self.check(plan)
                self.device.run(plan)
            has_started = plan is not None and plan.num_scheduled_tokens
            if scheduler.in_flight and (not has_started or len(scheduler.in_flight) > self.max_in_flight):
                oldest = scheduler.in_flight[0]
                scheduler.update(oldest, tokens_of(oldest))
            scheduler.kv.check_invariants(self.requests)
            if is_over and not scheduler.has_work and not scheduler.in_flight:
                return
        raise AssertionError("somebody starves")

    def add_request(self, number: int) -> None:
        first = self.new_request()
        first.request_id = str(number)
        most = min(4, self.max_num_seqs)
        fitting = [n for n in range(1, most + 1) if self.worst_case(first, n) <= self.spec.num_usable_blocks]
        for seq in group_of(first, self.rng.choice(fitting)):
            self.requests.append(seq)
            self.scheduler.add(seq)

    def worst_case(self, seq: Sequence, n: int) -> int:
        return self.spec.num_blocks_for_samples(seq.num_prompt_tokens, seq.max_tokens, n)

    def check(self, plan: SchedulerOutput) -> None:
        scheduled, running = plan.num_scheduled_tokens, self.scheduler.running
        assert plan.num_tokens <= self.budget and len(running) <= self.max_num_seqs
        rows = [seq.row for seq in running]
        assert len(set(rows)) == len(rows)
        assert all(n == 1 for n in list(scheduled.values())[: plan.num_decodes])
        assert len(plan.sampled) == len(plan.limits) == len(set(plan.sampled))
        for group in {seq.group for seq in running if seq.group}:
            self.num_groups_back += any(seq in plan.admitted and seq.num_output_tokens for seq in group.sequences)
            places = sorted(running.index(seq) for seq in group.unfinished if seq in running)
            assert places == list(range(places[0], places[0] + len(places))), "a group's sequences are neighbours"
            assert all(seq in running or seq in self.scheduler.forks.children for seq in group.unfinished)


@pytest.mark.parametrize(
    ("max_in_flight", "num_steps", "mode"),
    [(0, 1, "recompute"), (1, 1, "recompute"), (1, 1, "swap"), (1, 5, "recompute"), (0, 5, "swap")],
)
@pytest.mark.parametrize("seed", range(40))
def test_every_sample_of_any_walk_gets_its_tokens(seed, max_in_flight, num_steps, mode):
    walk = GroupWalk(seed, max_in_flight, num_steps, mode)
    walk.run(num_requests=15)
    kv = walk.scheduler.kv
    assert kv.pool.num_free == walk.spec.num_usable_blocks and not walk.scheduler.forks and not kv.swap_space.num_used
    for seq in walk.requests:
        output, reason = answer(seq)
        if seq.finish_reason == FinishReason.ABORT:
            assert seq.output_token_ids == output[: seq.num_output_tokens]
        else:
            assert (seq.output_token_ids, seq.finish_reason) == (output, reason)


def answer(seq: Sequence) -> tuple[list[int], str]:
    output = []
    while True:
        output.append(token_at(seq, seq.num_prompt_tokens + len(output)))
        if output[-1] in seq.params.stop_token_ids and len(output) >= seq.params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == seq.max_tokens:
            return output, FinishReason.LENGTH


def test_walks_meet_what_they_are_meant_to_meet():
    walks = [GroupWalk(seed, max_in_flight=1, mode=mode) for seed in range(40) for mode in ("recompute", "swap")]
    for walk in walks:
        walk.run(num_requests=15, abort_rate=0)
    assert sum(walk.num_groups_back for walk in walks) > 20, "groups that are preempted and come back must be common"
    assert sum(walk.device.num_copies for walk in walks) > 200
    assert sum(walk.device.num_groups_swapped_in for walk in walks) > 20


def step(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    if plan.num_scheduled_tokens:
        scheduler.update(plan, tokens_of(plan))
    return plan


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_one_prefill_serves_all_samples_and_the_prompts_full_blocks_stay_shared(prefix_caching):
    _, _, scheduler = make(max_num_seqs=8, prefix_caching=prefix_caching)
    seqs = group_of(request(1, list(range(10)), max_tokens=6), 4)
    for seq in seqs:
        scheduler.add(seq)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {seqs[0]: 10} and set(plan.sampled) == set(seqs)
    assert [fork.parent for fork in plan.forks] == [seqs[0]] * 3 and scheduler.kv.pool.num_used == 3
    second = scheduler.schedule()  # before anybody has seen a token
    assert second.num_decodes == 4 and len(second.copies) == 3, "the last owner writes in place"
    assert {copy.source for copy in second.copies} == {scheduler.running[-1].block_table.blocks[2]}
    assert scheduler.kv.pool.num_used == 6
    scheduler.update(plan, tokens_of(plan))
    scheduler.update(second, tokens_of(second))
    while scheduler.has_work:
        assert not step(scheduler).copies
    assert [seq.output_token_ids for seq in seqs] == [answer(seq)[0] for seq in seqs]
    assert scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_group_that_comes_back_needs_no_more_blocks_than_before(prefix_caching):
    _, _, scheduler = make(max_num_seqs=8, budget=64, prefix_caching=prefix_caching)
    for seq in group_of(request(1, list(range(17)), max_tokens=20), 4):
        scheduler.add(seq)
    for _ in range(9):
        step(scheduler)
    num_used = scheduler.kv.pool.num_used
    assert num_used == 4 + 4 * 3
    order = sorted(scheduler.running, key=lambda seq: seq.index)
    scheduler.preempt_all()
    assert scheduler.kv.pool.num_used == 0 and list(scheduler.waiting) == order
    assert all(seq.status is SequenceStatus.WAITING for seq in order)
    scheduler.kv.reset_prefix_cache()
    num_computed = 0
    while len(scheduler.running) < 4 or any(seq.num_output_tokens < 10 for seq in scheduler.running):
        num_computed += step(scheduler).num_tokens
    assert scheduler.kv.pool.num_used == num_used, "all that they share is shared again"
    assert num_computed == 26 + 3 * (26 - 16) + 1, "and computed once, but for the last token of the first"
    scheduler.kv.check_invariants(order)


def tables_of(seqs: list[Sequence]) -> list[list[int]]:
    """With blocks numbered in the order in which they first appear."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(i, len(numbers)) for i in seq.block_table.block_ids()] for seq in seqs]


def group_after(num_steps: int, **options) -> tuple[Scheduler, list[Sequence]]:
    _, _, scheduler = make(max_num_seqs=8, budget=64, **options)
    scheduler.kv.swap_space.capacity = 10 * CHUNK
    for seq in group_of(request(1, list(range(17)), max_tokens=20), 4):
        scheduler.add(seq)
    for _ in range(num_steps):
        step(scheduler)
    return scheduler, sorted(scheduler.running, key=lambda seq: seq.index)


def test_a_group_in_host_memory_has_each_block_once_and_shares_as_before_when_it_is_back():
    scheduler, seqs = group_after(num_steps=7)
    kv, tables, num_used = scheduler.kv, tables_of(seqs), scheduler.kv.pool.num_used
    swapped = swap_out_group(kv, seqs)
    assert len(swapped.block_ids) == num_used < sum(map(len, tables)) and seqs[0].swapped is swapped
    assert kv.pool.num_used == 0 and kv.swap_space.num_used == swapped.num_host_blocks
    kv.check_invariants(seqs)
    assert swap_in_group(kv, seqs[0], reserve=kv.pool.num_free) is None and kv.pool.num_used == 0
    assert swap_in_group(kv, seqs[0], reserve=kv.pool.num_free - num_used) is swapped
    assert tables_of(seqs) == tables and kv.pool.num_used == num_used and kv.swap_space.num_used == 0
    assert sorted(swapped.block_ids) == sorted({i for seq in seqs for i in seq.block_table.block_ids()})
    assert all(seq.num_computed_tokens == seq.num_tokens - 1 and seq.swapped is None for seq in seqs)
    kv.check_invariants(seqs)


@pytest.mark.parametrize("num_copied", range(4))
def test_a_copy_that_is_still_to_be_made_is_not_swapped_out_but_its_source(num_copied):
    """Right after the prompt: three of the samples will copy its last block, the fourth writes in place."""
    scheduler, seqs = group_after(num_steps=1)
    kv, tables = scheduler.kv, tables_of(seqs)
    for seq in seqs[:num_copied]:
        assert len(kv.allocate_slots(seq, 1)) == 1
    assert len(kv.copies) == num_copied
    swapped = swap_out_group(kv, seqs)
    assert len(swapped.block_ids) == kv.spec.num_blocks_for(17) and not kv.copies and kv.pool.num_used == 0
    kv.check_invariants(seqs)
    room = kv.pool.num_free - len(swapped.block_ids) - 3  # what the copies need is counted
    assert swap_in_group(kv, seqs[0], reserve=room + 1) is None
    assert swap_in_group(kv, seqs[0], reserve=room) is swapped and len(kv.copies) == 3
    kv.take_copies()
    kv.check_invariants(seqs)
    assert [table[:-1] for table in tables_of(seqs)] == [table[:-1] for table in tables]


def test_a_group_that_host_memory_cannot_hold_stays_where_it_is():
    scheduler, seqs = group_after(num_steps=7)
    scheduler.kv.swap_space.capacity = CHUNK
    tables = tables_of(seqs)
    assert swap_out_group(scheduler.kv, seqs) is None
    assert tables_of(seqs) == tables and not scheduler.kv.swap_space.num_used
    scheduler.kv.check_invariants(seqs)


def test_samples_that_end_in_host_memory_are_left_there():
    scheduler, seqs = group_after(num_steps=7)
    kv = scheduler.kv
    swap_out_group(kv, seqs)
    for seq in seqs[1:3]:
        seq.status = SequenceStatus.FINISHED
    swapped = swap_in_group(kv, seqs[0], reserve=0)
    assert [bool(seq.block_table.blocks) for seq in seqs] == [True, False, False, True]
    assert kv.pool.num_used == sum(i != 0 for i in swapped.block_ids) < len(swapped.block_ids)
    kv.check_invariants(seqs)


def test_a_group_waits_until_all_of_it_fits():
    _, _, scheduler = make(max_num_seqs=8, num_blocks=12)
    scheduler.add(request(1, [1] * 22, max_tokens=2))  # six of eleven blocks
    for seq in group_of(request(2, list(range(10)), max_tokens=4), 4):  # two shared, four of their own
        scheduler.add(seq)
    assert len(step(scheduler).admitted) == 1
    while scheduler.running[0].request_id == "1":
        assert len(scheduler.running) == 1
        step(scheduler)
        if not scheduler.running:
            break
    plan = step(scheduler)
    assert len(plan.admitted) == 4 and scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_shared", range(0, 31, 5))
@pytest.mark.parametrize("windows", [(None, 8), (8,), (None, 6, 9)])
def test_a_group_that_fits_alone_is_admitted_whatever_is_cached(windows, num_shared):
    prompt = list(range(30))
    spec = make(budget=8, windows=windows)[1]
    num_blocks = 1 + spec.num_blocks_for_samples(30, 12, num_samples=3)
    _, _, scheduler = make(budget=8, windows=windows, num_blocks=num_blocks)
    scheduler.add(request(1, prompt[:num_shared] + [99], max_tokens=1))
    while scheduler.has_work:
        step(scheduler)
    seqs = group_of(request(2, prompt, max_tokens=12), 3)
    for seq in seqs:
        scheduler.add(seq)
    for number in range(40):
        step(scheduler)
        scheduler.kv.check_invariants(scheduler.sequences)
        if number % 13 == 12:
            scheduler.preempt_all()
    assert [seq.output_token_ids for seq in seqs] == [answer(seq)[0] for seq in seqs]
    assert scheduler.num_preemptions == 0


def test_newcomers_do_not_take_the_blocks_that_forks_to_come_need_next():
    """Seven blocks: two for the group's prompt, three for the copies of its last one, and too few for the newcomer."""
    _, _, scheduler = make(max_num_seqs=8, num_blocks=8, budget=32)
    for seq in [*group_of(request(1, list(range(6)), max_tokens=2), 4), request(2, [9] * 13, max_tokens=2)]:
        scheduler.add(seq)
    assert [seq.request_id for seq in step(scheduler).admitted] == ["1"] * 4
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_group_needs_a_row_for_each():
    _, _, scheduler = make(max_num_seqs=4)
    scheduler.add(request(1, [1] * 3, max_tokens=2))
    for seq in group_of(request(2, [2] * 3, max_tokens=2), 4):
        scheduler.add(seq)
    assert [len(step(scheduler).admitted) for _ in range(3)] == [1, 0, 4]


def test_samples_that_end_leave_the_others_running():
    _, _, scheduler = make(max_num_seqs=4)
    first, second = group_of(request(1, [1] * 6, max_tokens=9), 2)
    for seq in (first, second):
        scheduler.add(seq)
    step(scheduler)
    step(scheduler)
    scheduler.finish(first, FinishReason.STOP)
    scheduler.preempt_all()
    assert list(scheduler.waiting) == [second]
    while scheduler.has_work:
        step(scheduler)
    assert second.output_token_ids == answer(second)[0] and scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("when", range(8))
def test_an_abort_at_any_moment_leaves_no_block_behind(when):
    _, _, scheduler = make(max_num_seqs=8, budget=8)
    seqs = group_of(request(1, list(range(14)), max_tokens=5), 3)
    for seq in seqs:
        scheduler.add(seq)
    for number in range(8):
        if number == when:
            for seq in random.Random(when).sample(seqs, 3):
                scheduler.finish(seq, FinishReason.ABORT)
            assert scheduler.kv.pool.num_used == 0 and not scheduler.forks and not scheduler.has_work
        if number == 3:
            scheduler.preempt_all()
        step(scheduler)
        scheduler.kv.check_invariants(seqs)
    assert scheduler.kv.pool.num_used == 0 or when > 7
