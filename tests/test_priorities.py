"""Priorities: the lower number comes first and goes last; within a number it is first come, first served."""

import dataclasses
import random

import pytest
from test_scheduler import Walk, check_end, counts, make, request, run_step

from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.preemption import Preemption
from jpaged.request_check import RequestCheck
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import Sequence
from jpaged.swap_space import CHUNK


class PriorityWalk(Walk):
    def new_request(self) -> Sequence:
        seq = super().new_request()
        seq.params = dataclasses.replace(seq.params, priority=self.rng.choice([-7, 0, 0, 2**40]))
        return seq


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(30))
def test_any_walk_keeps_the_order_and_everyone_gets_their_tokens(seed, mode, max_in_flight):
    walk = PriorityWalk(seed, max_in_flight)
    scheduler, first_admissions, before = walk.scheduler, [], []
    scheduler.preemption, scheduler.kv.swap_space.capacity = Preemption(mode), 3 * CHUNK
    for plan in walk.steps(num_requests=25):
        scheduler.kv.check_invariants(walk.requests)
        running = scheduler.running
        for queue in (running, list(scheduler.waiting)):
            assert queue == sorted(queue, key=lambda seq: (seq.params.priority, int(seq.request_id)))
        # a victim is newer, or of a lower priority, than all that stay; and whoever leads is never one
        gone = [seq for seq in before if not seq.is_finished and seq not in running]
        assert all(stays.order < victim.order for victim in gone for stays in running if stays in before)
        assert plan.num_preempted == len(gone)
        if running and not max_in_flight:
            assert running[0] in plan.num_scheduled_tokens
        counted = list(plan.num_scheduled_tokens.values())
        assert plan.num_tokens <= walk.budget and counted[: plan.num_decodes] == [1] * plan.num_decodes
        first_admissions += [seq for seq in plan.admitted if seq not in first_admissions]
        before = list(running)
        assert len(plan.swapped_out) == sum(seq.swapped is not None for seq in gone) <= plan.num_preempted
        assert not plan.swapped_out or not plan.admitted
        in_host = [seq.order for seq in scheduler.waiting if seq.swapped is not None]
        assert all(seq.order < min(in_host, default=seq.order) or not in_host for seq in plan.admitted)
    assert scheduler.kv.swap_space.num_used == 0
    for priority in (-7, 0, 2**40):
        admitted = [seq for seq in first_admissions if seq.params.priority == priority]
        assert admitted == sorted(admitted, key=lambda seq: int(seq.request_id))
    check_end(walk, [seq for seq in walk.requests if seq in first_admissions])


def test_walks_preempt_and_overtake():
    num_preempted = num_overtakings = num_chunks_before_decodes = 0
    for seed in range(40):
        walk, first = PriorityWalk(seed), []
        for plan in walk.steps(num_requests=25):
            first += [int(seq.request_id) for seq in plan.admitted if seq.num_output_tokens == 0]
            rows = list(plan.num_scheduled_tokens)
            order = [seq for seq in walk.scheduler.running if seq in rows and seq not in plan.admitted]
            num_chunks_before_decodes += order != [seq for seq in rows if seq in order]
        num_preempted += walk.num_preempted
        num_overtakings += sum(a > b for a, b in zip(first, first[1:]))
    assert min(num_preempted, num_overtakings, num_chunks_before_decodes) > 40


def test_lower_numbers_overtake_those_that_wait_and_nobody_that_runs():
    _, _, scheduler = make(max_num_seqs=1, budget=16)
    for number, priority in enumerate([5, 0, 5, -1, 0]):
        scheduler.add(request(number, [number] * 3, max_tokens=1, priority=priority))
        if number == 0:
            run_step(scheduler)  # has started before the others came
            scheduler.add(request(9, [9] * 3, max_tokens=1, priority=5))
    order = []
    while scheduler.has_work:
        order += [seq.request_id for seq in run_step(scheduler).admitted]
    assert order == ["3", "1", "4", "9", "2"]


def test_a_long_prompt_of_high_priority_leaves_each_decode_its_token():
    _, _, scheduler = make(budget=8, max_num_seqs=4)
    for number in range(3):
        scheduler.add(request(number, [number], max_tokens=9))
    run_step(scheduler)
    scheduler.add(request(7, [7] * 20, max_tokens=2, priority=-1))
    plans = [run_step(scheduler) for _ in range(2)]
    assert [counts(plan) for plan in plans] == [{"0": 1, "1": 1, "2": 1, "7": 5}] * 2
    assert [plan.num_decodes for plan in plans] == [3, 3]


def test_the_newest_of_the_lowest_priority_gives_way():
    _, _, scheduler = make(budget=32, num_blocks=9)
    for number, priority in enumerate([0, 1, 0]):
        scheduler.add(request(number, [number] * 7, max_tokens=13, priority=priority))
    run_step(scheduler)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.num_preempted == 1 and list(counts(plan)) == ["0", "2"]
    assert [seq.request_id for seq in scheduler.waiting] == ["1"]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves_within_a_priority_while_others_of_it_keep_coming(seed):
    rng = random.Random(seed)
    _, _, scheduler = make(budget=16, num_blocks=14, max_num_seqs=3)
    first = request(0, [0] * 20, max_tokens=20, priority=3)
    scheduler.add(first)
    for number in range(1, 200):
        scheduler.add(request(number, [number % 50] * rng.randint(1, 20), max_tokens=rng.randint(1, 20), priority=3))
        run_step(scheduler)
    assert first.is_finished


def test_a_priority_is_refused_where_nobody_looks_at_it():
    spec = CacheSpec(num_blocks=10, block_size=16, max_model_len=64)
    check = RequestCheck.of(EngineConfig(), spec, None, vocab_size=50, max_position=64)
    check([1], SamplingParams(priority=0))
    with pytest.raises(ValueError, match=r"^priority is 3, but scheduling_policy is fcfs.*must be 0"):
        check([1], SamplingParams(priority=3))
    check = RequestCheck.of(EngineConfig(scheduling_policy="priority"), spec, None, vocab_size=50, max_position=64)
    check([1], SamplingParams(priority=3))
