"""BatchBuilder: what the device makes of its buffers is a plain reading of the plan, whatever rows were used for before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_scheduler import VOCAB_SIZE, Walk, fake_tokens, make, request

from jpaged.batch import BatchBuilder
from jpaged.device_state import RowLoad, RowState, extend_tables, load_rows
from jpaged.sampling_batch import MAX_STOPS
from jpaged.sampling_params import MAX_STOP_TOKEN_IDS
from jpaged.sequence_group import SequenceGroup
from jpaged.step_input import StepInput, forward_batch, sampled_positions

NEWEST = 1000  # the newest token of row r is NEWEST + r, as far as these tests' device knows


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def read_step(bucket, max_num_seqs, block_size, num_groups, rows, buffer):
    step = StepInput.packing(*bucket, max_num_seqs, num_groups).unpack(buffer)
    rows = extend_tables(rows, step.table_updates)
    sampling = jax.tree.map(lambda table: table[step.sampled_rows], rows.sampling)
    return rows, forward_batch(step, rows, block_size, num_groups), sampling, sampled_positions(step), step


@functools.partial(jax.jit, static_argnums=0)
def read_load(table_width, rows, buffer):
    return load_rows(rows, RowLoad.packing(table_width).unpack(buffer))


class Device:
    """The device's side of a BatchBuilder, without a model."""

    def __init__(self, config, spec):
        self.builder = BatchBuilder(config, spec, VOCAB_SIZE)
        self.config, self.spec = config, spec
        rows = RowState.initial(config.max_num_seqs, spec.table_width)
        newest = NEWEST + np.arange(config.max_num_seqs + 1, dtype=np.int32)
        self.rows = jax.tree.map(jnp.asarray, RowState(newest, rows.block_tables, rows.sampling))

    def run(self, plan):
        """(ForwardBatch, sampling rows, sampled positions, StepInput) of the plan's step, as numpy arrays."""
        host_step = self.builder.build(plan)
        for buffer in host_step.row_loads:
            self.rows = read_load(self.spec.table_width, self.rows, buffer)
        static = host_step.bucket, self.config.max_num_seqs, self.spec.block_size, len(self.spec.windows)
        self.rows, *step = read_step(*static, self.rows, host_step.buffer)
        assert host_step.num_sampled == len(plan.sampled)
        wants_logprobs = any(seq.params.logprobs is not None for seq in plan.sampled)
        assert host_step.wants_logprobs == (wants_logprobs or bool(plan.prompt_logprobs))
        return jax.tree.map(np.asarray, step)


def plainly(plan, block_size, group, num_groups):
    """The step's inputs, one token at a time; a group's block tables as lists of their valid entries, None where its window
    has passed."""
    token_ids, positions, slots, starts, seq_lens, tables, indices, sampling = [], [], [], [0], [], [], [], []
    for (seq, num_tokens), start in zip(plan.num_scheduled_tokens.items(), plan.starts):
        end = start + num_tokens
        for position in range(start, end):
            token_ids.append(seq.token_ids[position] if position < seq.num_tokens else NEWEST + seq.row)
            positions.append(position)
            slots.append(seq.block_table.slot(position, block_size, group, num_groups))
        starts.append(len(token_ids))
        seq_lens.append(end)
        tables.append([block_id or None for block_id in seq.block_table.block_ids()[group::num_groups]])
        if seq in plan.sampled:
            indices.append(len(token_ids) - 1)
            params = seq.params
            sampling.append(
                {
                    "temperature": params.temperature,
                    "top_p": params.top_p,
                    "min_p": params.min_p,
                    "top_k": max(params.top_k, 0),
                    "seeds": [seq.seed // 2**32, seq.seed % 2**32],
                    "wants_logprobs": params.logprobs is not None,
                    "edit_slot": seq.edit_slot,
                    "stop_ids": sorted(seq.stop_token_ids) + [-1] * (MAX_STOPS - len(seq.stop_token_ids)),
                    "min_length": seq.num_prompt_tokens + params.min_tokens,
                }
            )
    targets = [-1] * len(indices)
    for seq, first, end in plan.prompt_logprobs:
        begin = list(plan.num_scheduled_tokens).index(seq)
        indices += [starts[begin] + position - plan.starts[begin] for position in range(first, end)]
        targets += seq.token_ids[first + 1 : end + 1]
    return token_ids, positions, slots, starts, seq_lens, tables, indices, targets, sampling


def check_step(plan, walk, *made):
    for group in range(len(walk.spec.windows)):
        check_group(group, plan, walk, *made)


def check_group(group, plan, walk, batch, sampling, sampled_at, step):
    plain = plainly(plan, walk.spec.block_size, group, len(walk.spec.windows))
    token_ids, positions, slots, starts, seq_lens, tables, indices, targets, rows = plain
    meta, num_tokens, num_seqs = batch.attention[group], len(token_ids), len(seq_lens)
    assert batch.token_ids[:num_tokens].tolist() == token_ids
    assert batch.positions[:num_tokens].tolist() == positions and not batch.positions[num_tokens:].any()
    assert meta.slot_mapping[:num_tokens].tolist() == slots and not meta.slot_mapping[num_tokens:].any()
    assert meta.query_start_loc[: num_seqs + 1].tolist() == starts
    assert (meta.query_start_loc[num_seqs:] == num_tokens).all()
    assert meta.seq_lens[:num_seqs].tolist() == seq_lens and not meta.seq_lens[num_seqs:].any()
    assert meta.distribution.tolist() == [plan.num_decodes, plan.num_decodes, num_seqs]
    for table, expected in zip(meta.block_tables, tables):
        assert [known and block_id for known, block_id in zip(expected, table.tolist())] == expected
    assert not meta.block_tables[num_seqs:].any()
    assert batch.logits_indices[: len(indices)].tolist() == indices and not batch.logits_indices[len(indices) :].any()
    assert sampled_at[: len(indices)].tolist() == [positions[i] + 1 for i in indices]
    assert step.limits[: len(rows)].tolist() == plan.limits and not step.limits[len(rows) :].any()
    assert step.targets[: len(targets)].tolist() == targets and (step.targets[len(targets) :] == -1).all()
    for i, expected in enumerate(rows):
        for name, value in expected.items():
            assert getattr(sampling, name)[i].tolist() == value, name
    padding = jax.tree.map(lambda table: table[len(rows) :], sampling)
    assert not padding.temperature.any() and not padding.wants_logprobs.any() and not padding.min_length.any()
    assert (padding.stop_ids == -1).all() and (step.sampled_rows[len(rows) :] == walk.max_num_seqs).all()


@pytest.mark.parametrize(("max_in_flight", "num_steps"), [(0, 1), (1, 1), (1, 5)])
@pytest.mark.parametrize(
    "seed", [*range(60, 66), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(66, 70))]
)
def test_the_device_reads_every_plan_plainly(seed, max_in_flight, num_steps):
    walk = Walk(seed, max_in_flight, num_steps)
    device = Device(walk.config, walk.spec)
    for plan in walk.steps(num_requests=12):
        if plan.num_scheduled_tokens:
            check_step(plan, walk, *device.run(plan))


def built(device, scheduler):
    plan = scheduler.schedule()
    step = device.run(plan)
    scheduler.update(plan, fake_tokens(plan))
    return step


def test_sequence_that_comes_back_in_the_same_row_brings_its_new_tokens_and_blocks():
    config, spec, scheduler = make(max_num_seqs=1, budget=16)
    device = Device(config, spec)
    seq = request(1, [11, 12, 13, 14, 15], max_tokens=9)
    scheduler.add(seq)
    built(device, scheduler)
    built(device, scheduler)
    scheduler.preempt_all()
    scheduler.kv.reset_prefix_cache()
    batch, *_ = built(device, scheduler)
    assert batch.token_ids[:7].tolist() == seq.token_ids[:7]
    assert batch.attention[0].slot_mapping[:7].tolist() == [seq.block_table.slot(p, 4) for p in range(7)]


def test_next_request_in_a_row_does_not_inherit_the_last_ones_parameters():
    config, spec, scheduler = make(max_num_seqs=1, budget=16)
    device = Device(config, spec)
    scheduler.add(
        request(1, [1], max_tokens=1, temperature=2.0, top_p=0.5, min_p=0.5, top_k=3, logprobs=2,
                min_tokens=1, stop_token_ids=(4, 5))
    )  # fmt: skip
    scheduler.add(request(2, [2], max_tokens=1, temperature=0.0))
    _, first, *_ = built(device, scheduler)
    assert first.wants_logprobs[0] and first.stop_ids[0, :2].tolist() == [4, 5] and first.min_length[0] == 2
    _, second, *_ = built(device, scheduler)
    assert second.seeds[0].tolist() == [0, 2]
    assert (second.temperature[0], second.top_p[0], second.min_p[0], second.top_k[0]) == (0, 1, 0, 0)
    assert not second.wants_logprobs[0] and (second.stop_ids == -1).all()


def test_prefix_hit_starts_after_the_shared_blocks_but_attends_to_them():
    config, spec, scheduler = make(budget=16, max_num_seqs=2)
    device = Device(config, spec)
    scheduler.add(request(1, [5] * 10, max_tokens=1))
    built(device, scheduler)
    scheduler.add(request(2, [5] * 9 + [6], max_tokens=1))
    batch, *_ = built(device, scheduler)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([5, 6], [8, 9])
    assert batch.attention[0].seq_lens[:1].tolist() == [10]
    assert batch.attention[0].block_tables[0, :2].tolist() == [1, 2]


def test_padding_writes_to_the_null_block():
    config, spec, scheduler = make(budget=16)
    device = Device(config, spec)
    scheduler.add(request(1, [1] * 5, max_tokens=2))
    batch, *_ = built(device, scheduler)
    assert len(batch.token_ids) == 6
    assert batch.attention[0].slot_mapping[5] < spec.block_size
    assert min(batch.attention[0].slot_mapping[:5]) >= spec.block_size


def test_step_in_which_nothing_is_sampled_still_has_a_program():
    config, spec, scheduler = make(budget=16)
    device = Device(config, spec)
    scheduler.add(request(1, [1] * 20))
    plan = scheduler.schedule()
    batch, sampling, *_ = device.run(plan)
    assert plan.sampled == [] and (batch.token_ids.shape, batch.logits_indices.shape) == ((16,), (4,))
    assert batch.logits_indices.tolist() == [0] * 4 and not sampling.temperature.any()


def test_stop_tokens_of_the_largest_request_fit_beside_the_models_own():
    config, spec, scheduler = make(budget=16)
    device = Device(config, spec)
    seq = request(1, [1], min_tokens=2, max_tokens=3, stop_token_ids=range(VOCAB_SIZE, VOCAB_SIZE + MAX_STOP_TOKEN_IDS))
    seq.stop_token_ids |= frozenset(range(1000, 1000 + MAX_STOPS - MAX_STOP_TOKEN_IDS))
    scheduler.add(seq)
    assert set(built(device, scheduler)[1].stop_ids[0]) == set(seq.stop_token_ids)


def test_samples_of_one_prompt_are_sampled_from_one_token_and_then_write_copies():
    config, spec, scheduler = make(budget=16, max_num_seqs=4)
    device = Device(config, spec)
    for seq in SequenceGroup(request(1, [5] * 10, max_tokens=4), 3).sequences:
        scheduler.add(seq)
    plan = scheduler.schedule()
    batch, sampling, _, step = device.run(plan)
    assert batch.logits_indices[:3].tolist() == [9, 9, 9] and not step.block_copies.any()
    assert step.sampled_rows[:3].tolist() == [seq.row for seq in plan.sampled]
    assert sampling.sample_index[:3].tolist() == [seq.index for seq in plan.sampled]
    assert sorted(sampling.sample_index[:3]) == [0, 1, 2]
    plan = scheduler.schedule()
    batch, _, _, step = device.run(plan)
    copies = [(copy.source.block_id, copy.destination.block_id) for copy in plan.copies]
    assert len(copies) == 2 and step.block_copies.tolist() == [*map(list, copies), *[[0, 0]] * (len(step.row_ids) - 2)]
    seqs = list(plan.num_scheduled_tokens)
    assert batch.token_ids[:3].tolist() == [NEWEST + seq.row for seq in seqs]
    for seq, table, slot in zip(seqs, batch.attention[0].block_tables, batch.attention[0].slot_mapping):
        assert table[:3].tolist() == seq.block_table.block_ids() and slot == seq.block_table.slot(10, 4)


def test_few_tokens_with_many_samples_still_have_a_program():
    config, spec, scheduler = make(budget=16, max_num_seqs=8)
    device = Device(config, spec)
    for seq in SequenceGroup(request(1, [5, 6], max_tokens=4), 7).sequences:
        scheduler.add(seq)
    batch, *_ = built(device, scheduler)
    assert batch.logits_indices[:7].tolist() == [1] * 7 and batch.token_ids[:2].tolist() == [5, 6]
