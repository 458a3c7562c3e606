"""Speculation: drafts change how many steps a request takes, and nothing else.

`Device` stands for the step and the pool: it keeps the token of each slot, and what it draws depends on all tokens before
as they are found through the block table. So a slot that was not written, or that a wrong draft has spoilt, shows.
"""

import random
from collections import deque

import numpy as np
import pytest

from jpaged.batch import BatchBuilder
from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.device_state import RowLoad
from jpaged.errors import NOT_FINITE
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import FinishReason, Sequence
from jpaged.sequence_group import SequenceGroup
from jpaged.step_input import StepInput

MAX_MODEL_LEN = 64
NGRAM = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def mostly_repeat(tokens: tuple[int, ...], sample: int) -> int:
    """What came seven tokens ago, but for one time in eight."""
    chance = hash((tokens, sample))
    return tokens[-7] if len(tokens) >= 7 and chance % 8 else chance % 50


def repeat(tokens: tuple[int, ...], sample: int) -> int:
    return tokens[-5]


def never_repeat(tokens: tuple[int, ...], sample: int) -> int:
    return len(tokens)


class Device:
    def __init__(self, config: EngineConfig, spec: CacheSpec, draw):
        self.spec, self.max_num_seqs, self.draw = spec, config.max_num_seqs, draw
        num_rows = config.max_num_seqs + 1
        self.slots = np.full(spec.num_blocks * spec.block_size, -1)
        self.tables = np.zeros((num_rows, spec.table_width), int)
        self.group = self.tables[:, :: len(spec.windows)]  # the first attention group's, which sees everything
        self.newest, self.samples = np.zeros(num_rows, int), np.zeros(num_rows, int)

    def slots_of(self, row: int, num_tokens: int) -> np.ndarray:
        position = np.arange(num_tokens)
        size = self.spec.block_size
        return self.group[row, position // size] * size + position % size

    def run(self, host_step) -> list[list[int]]:
        """The tokens of each sampling row."""
        for buffer in host_step.row_loads:
            load = RowLoad.packing(self.spec.table_width).views(buffer)
            self.tables[load.row_ids] = load.block_tables
            self.samples[load.row_ids] = load.sampling.sample_index
        step = StepInput.packing(*host_step.bucket, self.max_num_seqs, len(self.spec.windows)).views(host_step.buffer)
        for row, column, block in step.table_updates:
            if column < self.spec.table_width:
                self.tables[row, column] = block
        blocks = self.slots.reshape(self.spec.num_blocks, -1)
        for source, destination in step.block_copies:
            blocks[destination] = blocks[source]
        num_decodes, end_of_drafts, num_seqs = step.distribution
        at = {}  # (row, position) of each token
        for i in range(num_seqs):
            begin, end = step.query_start_loc[i : i + 2].tolist()
            assert end - begin == 1 if i < num_decodes else end - begin > 1 or i >= end_of_drafts
            row, start = int(step.row_ids[i]), int(step.starts[i])
            slots = self.slots_of(row, start + end - begin)
            for token in range(begin, end):
                token_id = step.token_ids[token]
                at[token] = row, start + token - begin
                self.slots[slots[start + token - begin]] = token_id if token_id >= 0 else self.newest[-1 - token_id]
        drawn = []
        for index, row in zip(step.logits_indices[: host_step.num_sampled].tolist(), step.sampled_rows.tolist()):
            of, position = at[index]  # a fork's first token comes from another's row
            tokens = tuple(self.slots[self.slots_of(of, position + 1)].tolist())
            drawn.append(self.draw(tokens, int(self.samples[row])))
            self.newest[row] = drawn[-1]
        return [[token] for token in drawn]


class Engine:
    """Scheduler, builder and device, with max_in_flight steps under way."""

    def __init__(
        self, draw, *, max_in_flight=0, num_blocks=200, block_size=4, budget=40, max_num_seqs=8, ngram=NGRAM,
        windows=(None,),
    ):  # fmt: skip
        self.config = EngineConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=block_size, speculative_config=ngram
        )
        spec = CacheSpec(
            num_blocks=num_blocks, block_size=block_size, max_model_len=MAX_MODEL_LEN, windows=windows,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        self.kv = KVCacheManager(spec)
        self.scheduler = Scheduler(self.config, self.kv)
        self.builder = BatchBuilder(self.config, spec, vocab_size=1000)
        self.device = Device(self.config, spec, draw)
        self.max_in_flight = max_in_flight
        self.results = deque()
        self.plans = []
        self.requests: list[list[Sequence]] = []

    def add(self, prompt: list[int], max_tokens: int, num_samples: int = 1, **params) -> list[Sequence]:
        params = SamplingParams(max_tokens=max_tokens, **params)
        drafter = self.scheduler.speculation.drafter_for(params)
        seq = Sequence(str(len(self.requests)), prompt, params, seed=1, max_tokens=max_tokens, drafter=drafter)
        seqs = [seq] if num_samples == 1 else SequenceGroup(seq, num_samples).sequences
        self.requests.append(seqs)
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for seqs in self.requests for seq in seqs]

    def step(self) -> None:
        plan = self.scheduler.schedule()
        has_started = plan is not None and bool(plan.num_scheduled_tokens)
        if has_started:
            self.plans.append(plan)
            self.results.append(self.device.run(self.builder.build(plan)))
        self.kv.check_invariants(self.sequences)
        if self.results and (not has_started or len(self.results) > self.max_in_flight):
            self.scheduler.update(self.scheduler.in_flight[0], self.results.popleft())

    def run(self) -> None:
        while self.scheduler.has_work or self.results:
            self.step()
        self.kv.check_invariants([])
        assert self.kv.pool.num_used == 0

    def count(self, name: str) -> int:
        return sum(getattr(plan, name) for plan in self.plans)


def answer(draw, seq: Sequence) -> tuple[list[int], str]:
    tokens, output = tuple(seq.token_ids[: seq.num_prompt_tokens]), []
    while True:
        output.append(draw(tokens, seq.index))
        tokens += (output[-1],)
        if output[-1] in seq.params.stop_token_ids and len(output) >= seq.params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == seq.max_tokens:
            return output, FinishReason.LENGTH


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("seed", range(25))
def test_every_request_of_any_walk_gets_its_tokens(seed, max_in_flight):
    """Arrivals, aborts, samples, stops and preemption, all at random."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4, 8])
    at_least = -(-MAX_MODEL_LEN // block_size) + 1
    engine = Engine(
        mostly_repeat, max_in_flight=max_in_flight, block_size=block_size, budget=rng.choice([12, 20, 60]),
        num_blocks=at_least + rng.choice([0, at_least // 2, 8 * at_least]), max_num_seqs=rng.choice([1, 4, 8]),
    )  # fmt: skip
    aborted = set()
    while len(engine.requests) < 25 or engine.scheduler.has_work:
        if rng.random() < 0.4 and len(engine.requests) < 25:
            length = rng.choice([1, 5, rng.randint(8, 40)])
            num_samples = rng.choice([1, 1, 1, 2]) if engine.config.max_num_seqs > 1 and length < 20 else 1
            max_tokens = rng.randint(1, (MAX_MODEL_LEN - length) // num_samples - num_samples)
            shared = random.Random(length).choices(range(50), k=length)
            stops = tuple(rng.sample(range(50), rng.choice([0, 0, 2])))
            min_tokens = rng.choice([0, max_tokens // 2])
            engine.add(shared, max_tokens, num_samples, stop_token_ids=stops, min_tokens=min_tokens)
        if rng.random() < 0.02 and engine.requests:
            for seq in rng.choice(engine.requests):
                if not seq.is_finished:
                    engine.scheduler.finish(seq, FinishReason.ABORT)
                    aborted.add(seq)
        engine.step()
    engine.run()
    for seq in engine.sequences:
        output, reason = answer(mostly_repeat, seq)
        if seq in aborted:
            assert seq.output_token_ids == output[: seq.num_output_tokens]
        else:
            assert (seq.output_token_ids, seq.finish_reason) == (output, reason)
    assert engine.count("num_draft_tokens") > engine.count("num_accepted_tokens") > 0


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_what_repeats_takes_a_fifth_of_the_steps_and_all_of_it_is_counted(max_in_flight):
    engine = Engine(repeat, max_in_flight=max_in_flight, budget=80)
    seqs = [engine.add(list(range(9)), 51)[0] for _ in range(8)]
    engine.run()
    assert all(seq.output_token_ids == answer(repeat, seq)[0] for seq in seqs)
    # 9 tokens prompt and 1 sampled; the period is seen whole after 5 more, then 50 tokens come five by five
    assert len(engine.plans) <= 2 + 4 + 50 // 5
    drafted = engine.count("num_draft_tokens")
    assert drafted == engine.count("num_accepted_tokens") == 8 * 51 - sum(len(plan.sampled) for plan in engine.plans)


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_where_nothing_repeats_nothing_is_drafted(max_in_flight):
    engine = Engine(never_repeat, max_in_flight=max_in_flight)
    engine.add(list(range(100, 109)), 50)
    engine.run()
    assert engine.count("num_draft_tokens") == 0 and len(engine.plans) == 50


def test_drafts_never_pass_the_last_token_that_a_request_may_have():
    engine = Engine(repeat)
    for max_tokens in range(1, 12):
        seq = engine.add([1, 2, 3, 4, 5] * 3, max_tokens)[0]
        engine.run()
        assert seq.num_output_tokens == max_tokens
        last = engine.plans[-1]
        assert last.starts[0] + last.num_tokens <= 14 + max_tokens
        engine.plans.clear()


def test_the_others_go_on_while_a_draft_is_verified():
    """Step N verifies one of nine; the other eight are in N + 1, and all nine in N + 2."""
    engine = Engine(
        lambda tokens, _: tokens[-5] if tokens[0] == 1 else len(tokens), max_in_flight=1, budget=80, max_num_seqs=9
    )
    one = engine.add([1, 2, 3, 4, 5] * 3, 40)[0]
    others = [engine.add([100 + i, 200], 40)[0] for i in range(8)]
    engine.run()
    at = [i for i, plan in enumerate(engine.plans[:20]) if plan.drafts]
    assert len(at) > 3 and all(list(engine.plans[i].drafts) == [one] for i in at)
    for i in at[1:-1]:
        assert set(engine.plans[i].num_scheduled_tokens) == {one, *others}
        assert set(engine.plans[i + 1].num_scheduled_tokens) == set(others)
    assert engine.plans[at[1] + 2].starts[-1] > engine.plans[at[1]].starts[-1] + 1


def test_where_many_are_verified_the_others_wait_with_them():
    """Everyone is in every step."""
    engine = Engine(lambda tokens, _: tokens[-5] if tokens[0] < 9 else len(tokens), max_in_flight=1)
    seqs = [engine.add([1, 2, 3, 4, 5] * 3, 30)[0], *(engine.add([100 + i, 200], 30)[0] for i in range(6))]
    engine.run()
    verified = [i for i, plan in enumerate(engine.plans) if plan.drafts]
    assert len(verified) > 3
    assert all(set(engine.plans[i].num_scheduled_tokens) == set(seqs) for i in verified)
    assert [b - a for a, b in zip(verified, verified[1:])] == [1] * (len(verified) - 1)


def test_no_draft_takes_the_block_that_another_sequence_needs():
    """Nine blocks: four for each prompt. The ninth is for the second sequence's next token, and not for a draft."""
    engine = Engine(repeat, num_blocks=10, block_size=4)
    first = engine.add([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4], 6)[0]
    second = engine.add([*range(20, 36)], 2)[0]
    engine.run()
    assert [plan.num_scheduled_tokens for plan in engine.plans[:2]] == [{first: 14, second: 16}, {first: 1, second: 1}]
    assert engine.count("num_preempted") == 0 and engine.count("num_draft_tokens") > 0
    assert [seq.num_output_tokens for seq in (first, second)] == [6, 2]


def test_no_draft_takes_a_block_of_any_attention_group_that_another_sequence_needs():
    """Five blocks beside the prompts': two for each of the others' next tokens, and one."""
    engine = Engine(repeat, windows=(None, 60), num_blocks=1 + 3 * 8 + 5, budget=60)
    first = engine.add([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4], 6)[0]
    others = [engine.add([*range(start, start + 16)], 2)[0] for start in (20, 40)]
    engine.run()
    assert engine.plans[1].num_scheduled_tokens == {seq: 1 for seq in (first, *others)}
    assert engine.count("num_preempted") == 0 and engine.count("num_draft_tokens") > 0


def test_the_rows_of_logits_suffice_for_every_plan():
    """Drafts may fill a step, but leave a row to every sequence that runs or comes in."""
    engine = Engine(repeat, budget=12, max_num_seqs=8, max_in_flight=0)
    assert engine.config.max_num_rows == 12
    for _ in range(8):
        engine.add([1, 2, 3, 4, 5] * 2, 40)
    engine.run()
    assert max(plan.num_draft_tokens for plan in engine.plans) == 4


def test_an_abort_between_draft_and_verdict_leaves_nothing_behind():
    for num_steps in range(1, 14):
        engine = Engine(mostly_repeat, max_in_flight=1)
        seqs = [engine.add([1, 2, 3, 4, 5, 6, 7] * 2, 40)[0], engine.add([9, 8, 7, 6, 5, 4, 3] * 2, 40)[0]]
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.finish(seqs[0], FinishReason.ABORT)
        engine.kv.check_invariants(engine.sequences)
        assert not seqs[0].block_table.blocks
        engine.run()
        assert seqs[1].output_token_ids == answer(mostly_repeat, seqs[1])[0]


def test_only_accepted_tokens_are_cached():
    """Every cached block holds tokens that some sequence really has."""
    engine = Engine(mostly_repeat, block_size=4)
    for i in range(4):
        engine.add([i, 2, 3, 4, 5, 6, 7] * 2, 45)
    engine.run()
    whole = [tuple(seq.token_ids) for seq in engine.sequences]
    cached = [block for block in engine.kv.pool.blocks if block.block_hash is not None]
    assert len(cached) >= 4 * 13 and engine.count("num_accepted_tokens") < engine.count("num_draft_tokens")
    for block in cached:
        content = tuple(engine.device.slots[block.block_id * 4 : block.block_id * 4 + 4].tolist())
        assert any(tokens[i : i + 4] == content for tokens in whole for i in range(0, len(tokens) - 3, 4))


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_an_error_never_comes_with_the_tokens_before_it(max_in_flight):
    """One of them may complete a stop string, which ends the request first, as where the tokens come one by one."""
    for num_right in range(1, 20):
        engine = Engine(
            lambda tokens, _: tokens[-5] if len(tokens) < 15 + num_right else NOT_FINITE, max_in_flight=max_in_flight
        )
        (seq,) = engine.add([1, 2, 3, 4, 5] * 3, 40)
        while not seq.is_finished:
            num_before = seq.num_output_tokens
            engine.step()
            assert seq.error is None or seq.num_output_tokens == num_before
        assert seq.output_token_ids == ([1, 2, 3, 4, 5] * 4)[:num_right] and seq.finish_reason == FinishReason.ERROR
        engine.run()
    assert engine.count("num_accepted_tokens") > 0


def test_what_others_will_fork_from_is_not_drafted_after():
    """The fork's first token comes from the last row of the prompt, whose last token is computed alone here."""
    engine = Engine(mostly_repeat, budget=14, max_num_seqs=4)
    seqs = engine.add([1, 2, 3, 4, 5] * 3, 20, num_samples=3)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans[:2]] == [14, 1]
    assert [seq.output_token_ids for seq in seqs] == [answer(mostly_repeat, seq)[0] for seq in seqs]
    assert engine.count("num_draft_tokens") > 0
