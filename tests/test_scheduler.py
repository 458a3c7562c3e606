"""Scheduler: within the budget, decodes first, first come first served, and everyone gets exactly what they asked for.

`Walk` drives a scheduler without a model: the token at a position is a function of the request and the position alone,
so that each request's right answer is known beforehand, however it is chunked, preempted or shared.
"""

import logging
import random

import pytest

from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.errors import NOT_FINITE
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence, SequenceStatus

MAX_MODEL_LEN = 48
VOCAB_SIZE = 50


def fake_token(seq: Sequence) -> int:
    return hash((int(seq.request_id), seq.num_tokens)) % VOCAB_SIZE


def fake_tokens(plan: SchedulerOutput) -> list[list[int]]:
    """A result of the plan's step; as from the device, each row as long as the longest."""
    ahead = range(max(plan.limits, default=0))
    return [[hash((int(s.request_id), s.num_tokens + i)) % VOCAB_SIZE for i in ahead] for s in plan.sampled]


WINDOWS = [(None,), (None,), (None, 6), (5,)]  # of the attention groups of some models


def make(
    *, max_num_seqs=4, budget=16, num_blocks=64, block_size=4, chunked=True, prefix_caching=True, num_steps=1,
    windows=(None,),
):  # fmt: skip
    config = EngineConfig(
        num_scheduler_steps=num_steps,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        block_size=block_size,
        enable_prefix_caching=prefix_caching,
    )
    spec = CacheSpec(
        num_blocks=num_blocks, block_size=block_size, max_model_len=MAX_MODEL_LEN, windows=windows,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    return config, spec, Scheduler(config, KVCacheManager(spec, enable_prefix_caching=prefix_caching))


def blocks_of_the_longest(block_size: int, windows: tuple[int | None, ...], budget: int) -> int:
    """The fewest usable blocks that serve MAX_MODEL_LEN."""
    spec = CacheSpec(
        num_blocks=2, block_size=block_size, max_model_len=MAX_MODEL_LEN, windows=windows, max_num_batched_tokens=budget
    )
    return spec.num_blocks_for(MAX_MODEL_LEN)


def request(number: int, prompt: list[int], max_tokens: int = 4, **params) -> Sequence:
    return Sequence(str(number), prompt, SamplingParams(**params), seed=number, max_tokens=max_tokens)


def run_step(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    if plan.num_scheduled_tokens:
        scheduler.update(plan, fake_tokens(plan))
    return plan


def counts(plan: SchedulerOutput) -> dict[str, int]:
    return {seq.request_id: n for seq, n in plan.num_scheduled_tokens.items()}


class Walk:
    """Random requests, arriving and being aborted at random, on a random engine; the seed decides all of it."""

    def __init__(self, seed: int, max_in_flight: int = 0, num_steps: int = 1):
        self.max_in_flight = max_in_flight  # steps whose results are not in yet when the next is planned
        self.rng = rng = random.Random(seed)
        self.max_num_seqs = rng.choice([1, 2, 5, 8, 8, 12])
        self.chunked = rng.random() < 0.7
        self.budget = max(self.max_num_seqs, 2) + rng.choice([0, 1, 7, 30]) if self.chunked else MAX_MODEL_LEN
        block_size = rng.choice([1, 3, 4, 8])
        windows = WINDOWS[seed % len(WINDOWS)]
        at_least = 1 + blocks_of_the_longest(block_size, windows, self.budget)
        self.config, self.spec, self.scheduler = make(
            max_num_seqs=self.max_num_seqs,
            budget=self.budget,
            num_blocks=at_least + rng.choice([0, at_least // 2, 3 * at_least]),
            block_size=block_size,
            chunked=self.chunked,
            prefix_caching=rng.random() < 0.6,
            num_steps=num_steps,
            windows=windows,
        )
        self.shared_prefix = [rng.randrange(VOCAB_SIZE) for _ in range(MAX_MODEL_LEN)]
        self.requests: list[Sequence] = []
        self.num_preempted = self.num_readmitted = self.num_hits = self.num_dropped = self.num_looked_again = 0
        self.num_long_steps = 0
        self.prompt_logprobs: dict[Sequence, list[int]] = {}  # positions as they were planned

    def new_request(self) -> Sequence:
        rng = self.rng
        length = rng.choice([1, 2, 5, 12, rng.randint(1, MAX_MODEL_LEN - 1)])
        num_shared = rng.choice([0, length // 2, length])
        prompt = self.shared_prefix[:num_shared] + [rng.randrange(VOCAB_SIZE) for _ in range(length - num_shared)]
        max_tokens = rng.randint(1, min(MAX_MODEL_LEN - length, 20))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.25]),
            top_k=rng.choice([-1, 0, 7]),
            top_p=rng.choice([1.0, 0.75]),
            min_p=rng.choice([0.0, 0.125]),
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 0, 3]) if self.chunked else None,
            presence_penalty=rng.choice([0, 0, 1]),
            min_tokens=rng.choice([0, max_tokens // 2]),
            max_tokens=max_tokens,
            stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 3])),
        )
        number = len(self.requests)
        return Sequence(str(number), prompt, params, seed=rng.getrandbits(64), max_tokens=max_tokens)

    def answer(self, seq: Sequence) -> tuple[list[int], str]:
        """What seq must end with, from its own definition alone."""
        output = []
        while True:
            output.append(hash((int(seq.request_id), seq.num_prompt_tokens + len(output))) % VOCAB_SIZE)
            if output[-1] in seq.params.stop_token_ids and len(output) >= seq.params.min_tokens:
                return output, FinishReason.STOP
            if len(output) == seq.max_tokens:
                return output, FinishReason.LENGTH

    def steps(self, num_requests: int, abort_rate: float = 0.03):
        """Yields each plan before its result is in; ends when every request has ended."""
        scheduler, rng = self.scheduler, self.rng
        num_steps = 0
        while len(self.requests) < num_requests or scheduler.has_work or scheduler.in_flight:
            for _ in range(rng.choice([0, 0, 0, 1, 3])):
                if len(self.requests) < num_requests:
                    self.requests.append(self.new_request())
                    scheduler.add(self.requests[-1])
            if rng.random() < abort_rate and self.requests:
                scheduler.finish(rng.choice(self.requests), FinishReason.ABORT)
            plan = scheduler.schedule()
            if plan is not None:
                self.num_preempted += plan.num_preempted
                self.num_readmitted += sum(seq.num_output_tokens > 0 for seq in plan.admitted)
                self.num_hits += plan.num_prefix_hits
                self.num_long_steps += max(plan.limits, default=1) > 1
                for seq, first, end in plan.prompt_logprobs:
                    self.prompt_logprobs.setdefault(seq, []).extend(range(first, end))
                yield plan
            else:
                self.num_looked_again += 1
            has_started = plan is not None and plan.num_scheduled_tokens
            if scheduler.in_flight and (not has_started or len(scheduler.in_flight) > self.max_in_flight):
                oldest = scheduler.in_flight[0]
                self.num_dropped += sum(seq.is_finished for seq in oldest.sampled)
                scheduler.update(oldest, fake_tokens(oldest))
            num_steps += 1
            assert num_steps < 200 * num_requests, "somebody starves"


def check_plan(walk: Walk, plan: SchedulerOutput, running_before: list[Sequence], missing_before: list[int]):
    scheduler, spec = walk.scheduler, walk.spec
    scheduled = plan.num_scheduled_tokens
    survivors = [seq for seq in scheduler.running if seq not in plan.admitted]

    assert plan.num_tokens == sum(scheduled.values()) <= walk.budget
    assert len(scheduler.running) <= walk.max_num_seqs
    assert len(plan.sampled) + plan.num_prompt_logprobs <= walk.max_num_seqs
    rows = [seq.row for seq in scheduler.running]
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(walk.max_num_seqs))
    assert all(seq.row is None and not len(seq.block_table) for seq in scheduler.waiting)

    for (seq, num_tokens), start in zip(scheduled.items(), plan.starts, strict=True):
        assert seq.status is SequenceStatus.RUNNING and seq in scheduler.running
        end = start + num_tokens
        assert num_tokens >= 1 and end <= seq.num_tokens and end == seq.num_computed_tokens
        assert len(seq.block_table) // len(spec.windows) * spec.block_size >= end
        assert walk.chunked or end == seq.num_tokens

    # the newest are preempted, and wait in their old order before those that never ran
    assert survivors == running_before[: len(survivors)]
    victims = running_before[len(survivors) :]
    assert len(victims) == plan.num_preempted
    assert list(scheduler.waiting)[: len(victims)] == victims

    # decodes lead the batch, and none of them sits out a step
    decodes = [s for s, n in zip(running_before, missing_before) if n == 1 and s in survivors]
    assert list(scheduled)[: plan.num_decodes] == decodes

    # a prompt is begun only when those before it are done: so a preempted sequence is never one already planned
    assert all(s is scheduler.running[-1] for s in scheduled if s.num_computed_tokens < s.num_tokens)

    # the oldest always gets on
    if survivors:
        assert survivors[0] in scheduled
    assert scheduled or not scheduler.has_work


@pytest.mark.parametrize("seed", range(60))
def test_every_request_of_any_walk_gets_its_tokens_within_the_rules(seed):
    walk = Walk(seed)
    scheduler, kv = walk.scheduler, walk.scheduler.kv
    first_admissions = []
    steps = walk.steps(num_requests=25)
    running, missing = [], []
    for plan in steps:
        running = [seq for seq in running if not seq.is_finished]
        check_plan(walk, plan, running, [missing[seq.request_id] for seq in running])
        first_admissions += [seq for seq in plan.admitted if seq not in first_admissions]
        kv.check_invariants(walk.requests)
        # what the next step will see: everyone who runs now, each with what its result leaves missing
        running = list(scheduler.running)
        missing = {seq.request_id: max(seq.num_tokens - seq.num_computed_tokens, 1) for seq in running}
    check_end(walk, first_admissions)


def check_end(walk: Walk, first_admissions: list[Sequence]):
    scheduler, kv = walk.scheduler, walk.scheduler.kv
    assert not scheduler.running and not scheduler.waiting and not scheduler.in_flight
    kv.check_invariants(walk.requests)
    assert kv.pool.num_free == walk.spec.num_usable_blocks

    ever_ran = set(first_admissions)
    assert first_admissions == [seq for seq in walk.requests if seq in ever_ran]
    for seq in walk.requests:
        output, reason = walk.answer(seq)
        if seq.finish_reason == FinishReason.ABORT:
            assert seq.output_token_ids == output[: seq.num_output_tokens]
        else:
            assert (seq.output_token_ids, seq.finish_reason) == (output, reason)
            wants_prompt = seq.params.prompt_logprobs is not None
            positions = list(range(seq.num_prompt_tokens - 1)) if wants_prompt else []
            assert walk.prompt_logprobs.get(seq, []) == positions  # each once, in order, whatever came between


@pytest.mark.parametrize(("max_in_flight", "num_steps"), [(1, 1), (2, 1), (0, 5), (1, 5)])
@pytest.mark.parametrize("seed", range(60))
def test_steps_in_flight_and_long_steps_change_no_ones_tokens(seed, max_in_flight, num_steps):
    walk = Walk(seed, max_in_flight, num_steps)
    first_admissions = []
    for plan in walk.steps(num_requests=25):
        first_admissions += [seq for seq in plan.admitted if seq not in first_admissions]
        assert len(plan.sampled) + plan.num_prompt_logprobs <= walk.max_num_seqs
        assert plan.num_tokens <= walk.budget and not (plan.num_preempted and len(walk.scheduler.in_flight) > 1)
        for seq in plan.num_scheduled_tokens:
            assert seq.num_output_tokens + seq.num_pending <= seq.max_tokens, "scheduled past its end"
        walk.scheduler.kv.check_invariants(walk.requests)
    check_end(walk, first_admissions)


def test_a_block_is_not_cached_before_its_step_has_run():
    _, _, scheduler = make(budget=16)
    scheduler.add(request(1, [5] * 9))
    first = scheduler.schedule()
    scheduler.add(request(2, [5] * 9))
    second = scheduler.schedule()
    assert second.num_prefix_hits == 0 and counts(second) == {"1": 1, "2": 9}
    scheduler.add(request(3, [5] * 9))
    scheduler.update(first, [[1]])
    third = scheduler.schedule()
    assert third.num_prefix_hits == 8 and counts(third) == {"1": 1, "2": 1, "3": 1}


def test_the_device_decodes_on_only_where_everyone_can():
    _, _, scheduler = make(budget=16, num_steps=4)
    scheduler.add(request(1, [1] * 3, max_tokens=9))
    scheduler.add(request(2, [2] * 3, max_tokens=3))
    assert run_step(scheduler).limits == [1, 1]  # prompts
    assert run_step(scheduler).limits == [4, 2]  # 2 ends after its second
    assert run_step(scheduler).limits == [4]
    assert run_step(scheduler).limits == [] and not scheduler.has_work

    for number, params in enumerate([{"stop": ["x"]}, {"logprobs": 1}]):
        scheduler.add(request(10 + number, [3 + number], max_tokens=3, **params))
        assert [run_step(scheduler).limits for _ in range(3)] == [[1]] * 3

    scheduler.add(request(20, [7], max_tokens=30))
    run_step(scheduler)
    scheduler.add(request(21, [8] * 40))
    assert run_step(scheduler).limits == [1]  # somebody comes in


def test_walks_with_long_steps_meet_some():
    walks = [Walk(seed, max_in_flight=1, num_steps=5) for seed in range(60)]
    for walk in walks:
        for _ in walk.steps(num_requests=5, abort_rate=0):
            pass
    assert sum(walk.num_long_steps for walk in walks) > 40


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_walks_meet_what_they_are_meant_to_meet(max_in_flight):
    totals, lost = [0, 0, 0], [0, 0]
    for seed in range(60):
        walk = Walk(seed, max_in_flight)
        for _ in walk.steps(num_requests=25):
            pass
        totals = [a + b for a, b in zip(totals, (walk.num_preempted, walk.num_readmitted, walk.num_hits))]
        lost = [a + b for a, b in zip(lost, (walk.num_dropped, walk.num_looked_again))]
    assert min(totals) > 60, f"preemptions, readmissions and prefix hits must all be common, got {totals}"
    if max_in_flight:
        assert min(lost) > 60, f"rows of stopped sequences and plans given up must be common, got {lost}"
    else:
        assert lost == [0, 0]


def test_step_without_requests_is_empty():
    _, _, scheduler = make()
    assert not scheduler.has_work and scheduler.schedule().num_scheduled_tokens == {}


def test_long_prompt_does_not_stop_the_others_tokens():
    _, _, scheduler = make(budget=8)
    scheduler.add(request(1, [1] * 3, max_tokens=9))
    assert counts(run_step(scheduler)) == {"1": 3}
    scheduler.add(request(2, [2] * 20))
    plans = [run_step(scheduler) for _ in range(4)]
    assert [counts(plan) for plan in plans] == [{"1": 1, "2": 7}, {"1": 1, "2": 7}, {"1": 1, "2": 6}, {"1": 1, "2": 1}]
    assert [plan.num_decodes for plan in plans] == [1, 1, 1, 2]
    assert [[seq.request_id for seq in plan.admitted] for plan in plans] == [["2"], [], [], []]


def test_only_sequences_whose_last_token_is_computed_are_sampled():
    _, _, scheduler = make(budget=8)
    scheduler.add(request(1, [1] * 10))
    plan = scheduler.schedule()
    assert counts(plan) == {"1": 8} and plan.sampled == []
    assert scheduler.update(plan, []) == []
    plan = scheduler.schedule()
    (seq,) = plan.sampled
    assert scheduler.update(plan, [[7]]) == [(0, seq, [7])] and seq.output_token_ids == [7]


def test_without_chunked_prefill_a_prompt_waits_until_all_of_it_fits_the_step():
    _, _, scheduler = make(budget=48, chunked=False, max_num_seqs=8)
    for number, length in enumerate([30, 20, 5]):
        scheduler.add(request(number, [number] * length))
    assert counts(run_step(scheduler)) == {"0": 30}  # 20 do not fit, and 5 do not overtake
    assert counts(run_step(scheduler)) == {"0": 1, "1": 20, "2": 5}


def test_no_one_is_admitted_past_max_num_seqs_and_rows_are_used_again():
    _, _, scheduler = make(max_num_seqs=2, budget=16)
    for number in range(5):
        scheduler.add(request(number, [number] * 2, max_tokens=number % 2 + 1))
    rows_of = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        rows_of |= {seq.request_id: seq.row for seq in plan.admitted}
        assert len(scheduler.running) <= 2
        scheduler.update(plan, fake_tokens(plan))
    assert set(rows_of) == set("01234") and set(rows_of.values()) == {0, 1}


def crowd(num_requests=3, **options):
    """Requests of 7 prompt tokens that all run at once, and outgrow a pool with one block too few (block size 4)."""
    _, _, scheduler = make(budget=32, num_blocks=3 * num_requests, **options)
    for number in range(num_requests):
        scheduler.add(request(number, [number] * 7, max_tokens=13))
    run_step(scheduler)
    assert len(scheduler.running) == num_requests and scheduler.kv.pool.num_free == num_requests - 1
    return scheduler


def test_newest_sequence_gives_way_when_blocks_run_out_and_comes_back_first():
    scheduler = crowd()
    run_step(scheduler)  # 8 tokens each: two full blocks
    scheduler.add(request(9, [9], max_tokens=1))
    plan = scheduler.schedule()
    assert (plan.num_preempted, counts(plan), plan.num_decodes) == (1, {"0": 1, "1": 1}, 2)
    assert [seq.request_id for seq in scheduler.waiting] == ["2", "9"]
    victim = scheduler.waiting[0]
    assert (victim.num_computed_tokens, victim.num_output_tokens, victim.status) == (0, 2, SequenceStatus.WAITING)


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 6), ((None, 8), 15)])  # for three prompts, at least
def test_newcomer_does_not_take_the_blocks_that_running_sequences_need_next(windows, num_blocks):
    _, _, scheduler = make(budget=32, num_blocks=1 + num_blocks, windows=windows)
    for number in range(3):
        scheduler.add(request(number, [number] * 8, max_tokens=4))
    assert counts(run_step(scheduler)) == {"0": 8, "1": 8}  # the third would fit, but not for long
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.num_preemptions == 0


def test_preempted_sequence_finishes_as_if_nothing_had_happened():
    scheduler = crowd()
    sequences = list(scheduler.running)
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.num_preemptions > 0
    for seq in sequences:
        assert seq.output_token_ids == [hash((int(seq.request_id), p)) % VOCAB_SIZE for p in range(7, 20)]


def test_recompute_of_a_preempted_sequence_does_not_count_as_a_new_prompt():
    scheduler = crowd()
    num_new = 0
    while scheduler.has_work:
        num_new += run_step(scheduler).num_new_prompt_tokens
    assert num_new == 0  # all three were counted in the step that `crowd` ran


def test_warning_of_preemption_names_the_count_so_far_and_the_knobs(caplog):
    scheduler = crowd()
    with caplog.at_level(logging.WARNING):
        while scheduler.has_work:
            run_step(scheduler)
    lines = [record.getMessage() for record in caplog.records if record.name == "jpaged.preemption"]
    assert len(lines) == scheduler.num_preemptions >= 2
    for number, line in enumerate(lines, start=1):
        assert f"({number} preemptions so far)" in line and "\n" not in line
        assert all(knob in line for knob in ("kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"))
        assert "the KV pool's 8 blocks" in line
    assert "request 2 " in lines[0]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborted_request_frees_its_blocks_at_once_and_only_once(num_steps):
    _, spec, scheduler = make(budget=4)
    seq = request(1, [1] * 6, max_tokens=9)
    scheduler.add(seq)
    for _ in range(num_steps):
        run_step(scheduler)
    scheduler.finish(seq, FinishReason.ABORT)
    scheduler.finish(seq, FinishReason.STOP)
    assert (seq.finish_reason, seq.status) == (FinishReason.ABORT, SequenceStatus.FINISHED)
    assert not scheduler.has_work and scheduler.kv.pool.num_free == spec.num_usable_blocks


def test_all_preempted_sequences_wait_in_the_order_of_their_admission():
    _, spec, scheduler = make(max_num_seqs=3)
    for number in range(5):
        scheduler.add(request(number, [number] * 3))
    run_step(scheduler)
    scheduler.preempt_all()
    assert [seq.request_id for seq in scheduler.waiting] == list("01234")
    assert scheduler.kv.pool.num_free == spec.num_usable_blocks
    assert [seq.request_id for seq in run_step(scheduler).admitted] == list("012")


def test_prefix_hit_is_not_computed_again_and_is_counted():
    _, _, scheduler = make(budget=32)
    scheduler.add(request(1, [5] * 10, max_tokens=2))
    plan = run_step(scheduler)
    assert (plan.num_prefix_queries, plan.num_prefix_hits, plan.num_new_prompt_tokens) == (10, 0, 10)
    late = request(2, [5] * 10, max_tokens=2)
    scheduler.add(late)
    plan = run_step(scheduler)
    assert counts(plan) == {"1": 1, "2": 2} and late.num_cached_tokens == 8
    assert (plan.num_prefix_queries, plan.num_prefix_hits, plan.num_new_prompt_tokens) == (10, 8, 10)


@pytest.mark.parametrize(
    ("prefix_caching", "prompt_logprobs", "num_queries"), [(True, None, 10), (False, None, 0), (True, 0, 0)]
)
def test_only_tokens_that_are_looked_up_count_as_queries(prefix_caching, prompt_logprobs, num_queries):
    _, _, scheduler = make(max_num_seqs=12, prefix_caching=prefix_caching)
    scheduler.add(request(1, [5] * 10, prompt_logprobs=prompt_logprobs))
    plan = run_step(scheduler)
    assert counts(plan) == {"1": 10} and plan.num_prefix_queries == num_queries


@pytest.mark.parametrize("who", ["pinned", "running", "ended", "came later"])
def test_a_sequence_without_numbers_takes_nothing_along_that_others_have_computed_or_hold(who):
    _, _, scheduler = make(budget=32)
    kv, prefix = scheduler.kv, list(range(8))
    other, bad = request(1, prefix + [9], max_tokens=2 if who == "ended" else 9), request(2, prefix + [40] * 9)
    for seq in (bad, other) if who == "came later" else (other, bad):
        scheduler.add(seq)
        run_step(scheduler)
    if who == "pinned":
        kv.pinned.pin(kv.pinned.hold_tail(request(0, [])), prefix)
        scheduler.finish(other, FinishReason.ABORT)
    plan = scheduler.schedule()
    scheduler.update(plan, [[NOT_FINITE if seq is bad else 7] for seq in plan.sampled])
    assert bad.finish_reason == FinishReason.ERROR and other.is_finished == (who in ("pinned", "ended"))
    assert kv.match_prefix(request(3, prefix + [40] * 9)).num_tokens == 8
    kv.check_invariants([other, bad])


@pytest.mark.parametrize("num_shared", range(0, 48, 4))
@pytest.mark.parametrize("windows", [(None, 8), (8,), (None, 6, 9)])
def test_whoever_fits_alone_is_admitted_whatever_is_cached(windows, num_shared):
    """By others, or by itself before it was preempted: what a hit holds of a windowed group is given back as the window
    moves on."""
    _, _, scheduler = make(budget=8, num_blocks=1 + blocks_of_the_longest(4, windows, 8), windows=windows)
    prompt = list(range(47))
    scheduler.add(request(1, prompt[:num_shared] + [99], max_tokens=1))
    while scheduler.has_work:
        run_step(scheduler)
    late = request(2, prompt, max_tokens=1)
    scheduler.add(late)
    while not late.is_finished:
        for _ in range(4):
            plan = run_step(scheduler)
            assert late.is_finished or late in plan.num_scheduled_tokens
            scheduler.kv.check_invariants(scheduler.sequences)
        scheduler.preempt_all()


def test_next_turn_of_a_conversation_finds_the_answer_too():
    _, _, scheduler = make(budget=2, max_num_seqs=2)  # prompts in chunks smaller than a block
    first = request(1, [5] * 7, max_tokens=14)
    scheduler.add(first)
    while scheduler.has_work:
        run_step(scheduler)
    # all but the last token were computed: 20, five blocks
    late = request(2, first.token_ids + [6], max_tokens=1)
    scheduler.add(late)
    run_step(scheduler)
    assert late.num_cached_tokens == 20


def test_blocks_filled_in_a_step_can_be_matched_only_by_later_steps():
    _, _, scheduler = make(budget=32)
    for number in range(2):
        scheduler.add(request(number, [5] * 10, max_tokens=2))
    assert counts(run_step(scheduler)) == {"0": 10, "1": 10}


def test_cached_tokens_reported_are_those_of_the_first_admission():
    scheduler = crowd()
    victim = scheduler.running[-1]
    while scheduler.has_work:
        run_step(scheduler)
    assert victim.num_cached_tokens == 0
