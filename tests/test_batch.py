"""BatchBuilder: its arrays are those of a plain reading of the plan, whatever rows were used for before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_scheduler import VOCAB_SIZE, Walk, fake_token, make, request

from jpaged.batch import BatchBuilder
from jpaged.buckets import bucket_ladder
from jpaged.packed_step import PackedStep
from jpaged.sampling_batch import MAX_BANNED_TOKENS
from jpaged.sampling_params import MAX_STOP_TOKEN_IDS


def plainly(plan, walk):
    """The step's inputs, one token at a time; block tables as lists of their valid entries."""
    size, max_seqs = walk.spec.block_size, walk.max_num_seqs
    token_ids, positions, slots, starts, seq_lens, tables, rows, sampling = [], [], [], [0], [], [], [], []
    for (seq, num_tokens), start in zip(plan.num_scheduled_tokens.items(), plan.starts):
        end = start + num_tokens
        for position in range(start, end):
            token_ids.append(seq.token_ids[position] if position < seq.num_tokens else -1 - seq.row)
            positions.append(position)
            block = seq.block_table.blocks[position // size]
            slots.append(block.block_id * size + position % size)
        starts.append(len(token_ids))
        seq_lens.append(end)
        tables.append([block.block_id for block in seq.block_table.blocks])
        if seq in plan.sampled:
            rows.append(len(token_ids) - 1)
            params = seq.params
            is_banned = end - seq.num_prompt_tokens < params.min_tokens
            sampling.append(
                {
                    "temperature": params.temperature,
                    "top_p": params.top_p,
                    "min_p": params.min_p,
                    "top_k": max(params.top_k, 0),
                    "seeds": [seq.seed // 2**32, seq.seed % 2**32],
                    "positions": end,
                    "state_rows": seq.row,
                    "wants_logprobs": params.logprobs is not None,
                    "banned_ids": set(seq.stop_token_ids) if is_banned else set(),
                }
            )
    num_padded = min(t for t in bucket_ladder(walk.budget) if t >= len(token_ids))
    padding = [0] * (num_padded - len(token_ids))
    absent = max_seqs - len(seq_lens)
    return (
        {
            "token_ids": token_ids + padding,
            "positions": positions + padding,
            "slot_mapping": slots + padding,
            "query_start_loc": starts + [len(token_ids)] * absent,
            "seq_lens": seq_lens + [0] * absent,
            "distribution": [plan.num_decodes, plan.num_decodes, len(seq_lens)],
        },
        tables,
        rows,
        sampling,
    )


def check_step(plan, walk, step):
    batch, sampling = step.batch, step.sampling
    for got, meant in zip(jax.tree.leaves((batch, sampling)), jax.tree.leaves(unpacked(step, walk)), strict=True):
        np.testing.assert_array_equal(got, meant)
    assert step.num_sampled == len(plan.sampled)
    arrays, tables, rows, rows_sampling = plainly(plan, walk)
    meta = batch.attention
    built = {"token_ids": batch.token_ids, "positions": batch.positions} | {
        name: getattr(meta, name) for name in ("slot_mapping", "query_start_loc", "seq_lens", "distribution")
    }
    for name, expected in arrays.items():
        assert built[name].dtype == np.int32 and built[name].tolist() == expected, name
    assert meta.block_tables.shape == (walk.max_num_seqs, walk.spec.max_blocks_per_seq)
    assert meta.block_tables.dtype == np.int32
    for i, table in enumerate(tables):
        assert meta.block_tables[i, : len(table)].tolist() == table
    assert meta.block_tables.min() >= 0 and meta.block_tables.max() < walk.spec.num_blocks
    num_padded = len(batch.logits_indices)
    assert len(rows) <= num_padded <= len(batch.token_ids)
    assert batch.logits_indices.dtype == np.int32
    assert batch.logits_indices.tolist() == rows + [0] * (num_padded - len(rows))
    for i, expected in enumerate(rows_sampling):
        for name in ("temperature", "top_p", "min_p", "top_k", "positions", "wants_logprobs", "state_rows"):
            assert getattr(sampling, name)[i] == expected[name], name
        assert sampling.seeds[i].tolist() == expected["seeds"]
        assert set(sampling.banned_ids[i].tolist()) - {-1} == expected["banned_ids"]
    neutral = PackedStep(len(batch.token_ids), num_padded, num_seqs=1, max_blocks=1).empty()[2]
    for field in dataclasses.fields(sampling):
        got, blank = getattr(sampling, field.name), getattr(neutral, field.name)
        assert got.dtype == blank.dtype and got.shape == blank.shape
        assert (got[len(rows) :] == blank[len(rows) :]).all(), f"padding of {field.name} asks for work"


def unpacked(step, walk):
    """What the device makes of the buffer."""
    packing = PackedStep(*step.bucket, walk.max_num_seqs, walk.spec.max_blocks_per_seq)
    return packing.unpack(jnp.asarray(step.buffer))


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("seed", range(60, 80))
def test_arrays_are_those_of_a_plain_reading_of_every_plan(seed, max_in_flight):
    walk = Walk(seed, max_in_flight)
    builder = BatchBuilder(walk.config, walk.spec)
    for plan in walk.steps(num_requests=20):
        if plan.num_scheduled_tokens:
            check_step(plan, walk, builder.build(plan))


def built(builder, scheduler):
    plan = scheduler.schedule()
    step = builder.build(plan)
    scheduler.update(plan, [fake_token(seq) for seq in plan.sampled])
    return step.batch, step.sampling


def test_sequence_that_comes_back_in_the_same_row_brings_its_new_tokens_and_blocks():
    config, spec, scheduler = make(max_num_seqs=1, budget=16)
    builder = BatchBuilder(config, spec)
    seq = request(1, [11, 12, 13, 14, 15], max_tokens=9)
    scheduler.add(seq)
    built(builder, scheduler)
    built(builder, scheduler)
    scheduler.preempt_all()
    scheduler.kv.reset_prefix_cache()
    batch, _ = built(builder, scheduler)
    assert batch.token_ids[:7].tolist() == seq.token_ids[:7]
    assert batch.attention.slot_mapping[:7].tolist() == [seq.block_table.slot(p, 4) for p in range(7)]


def test_next_request_in_a_row_does_not_inherit_the_last_ones_parameters():
    config, spec, scheduler = make(max_num_seqs=1, budget=16)
    builder = BatchBuilder(config, spec)
    scheduler.add(
        request(1, [1], max_tokens=1, temperature=2.0, top_p=0.5, min_p=0.5, top_k=3, logprobs=2,
                min_tokens=1, stop_token_ids=(4, 5))
    )  # fmt: skip
    scheduler.add(request(2, [2], max_tokens=1, temperature=0.0))
    _, first = built(builder, scheduler)
    assert first.wants_logprobs[0] and first.banned_ids[0, :2].tolist() == [4, 5]
    _, second = built(builder, scheduler)
    assert second.seeds[0].tolist() == [0, 2]
    assert (second.temperature[0], second.top_p[0], second.min_p[0], second.top_k[0]) == (0, 1, 0, 0)
    assert not second.wants_logprobs[0] and (second.banned_ids == -1).all()


def test_prefix_hit_starts_after_the_shared_blocks_but_attends_to_them():
    config, spec, scheduler = make(budget=16, max_num_seqs=2)
    builder = BatchBuilder(config, spec)
    scheduler.add(request(1, [5] * 10, max_tokens=1))
    built(builder, scheduler)
    scheduler.add(request(2, [5] * 9 + [6], max_tokens=1))
    batch, _ = built(builder, scheduler)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([5, 6], [8, 9])
    assert batch.attention.seq_lens.tolist() == [10, 0]
    assert batch.attention.block_tables[0, :2].tolist() == [1, 2]


def test_padding_writes_to_the_null_block():
    config, spec, scheduler = make(budget=16)
    builder = BatchBuilder(config, spec)
    scheduler.add(request(1, [1] * 5, max_tokens=2))
    batch, _ = built(builder, scheduler)
    assert len(batch.token_ids) == 6
    assert batch.attention.slot_mapping[5] < spec.block_size
    assert min(batch.attention.slot_mapping[:5]) >= spec.block_size


def test_step_in_which_nothing_is_sampled_still_has_a_program():
    config, spec, scheduler = make(budget=16)
    builder = BatchBuilder(config, spec)
    scheduler.add(request(1, [1] * 20))
    plan = scheduler.schedule()
    step = builder.build(plan)
    batch, sampling = step.batch, step.sampling
    assert plan.sampled == [] and (batch.token_ids.shape, batch.logits_indices.shape) == ((16,), (4,))
    assert batch.logits_indices.tolist() == [0] * 4 and not sampling.temperature.any()


def test_banned_tokens_of_the_largest_request_fit_beside_the_models_own():
    config, spec, scheduler = make(budget=16)
    builder = BatchBuilder(config, spec)
    seq = request(1, [1], min_tokens=2, max_tokens=3, stop_token_ids=range(VOCAB_SIZE, VOCAB_SIZE + MAX_STOP_TOKEN_IDS))
    seq.stop_token_ids |= frozenset(range(1000, 1000 + MAX_BANNED_TOKENS - MAX_STOP_TOKEN_IDS))
    scheduler.add(seq)
    for is_banned in (True, True, False):
        assert set(built(builder, scheduler)[1].banned_ids[0]) == (set(seq.stop_token_ids) if is_banned else {-1})


def test_empty_step_asks_for_nothing():
    _, batch, sampling = PackedStep(8, 4, num_seqs=3, max_blocks=5).empty()
    for array in (batch.token_ids, batch.positions, batch.logits_indices, *vars(batch.attention).values()):
        assert array.dtype == np.int32 and not array.any()
    assert not sampling.temperature.any() and not sampling.wants_logprobs.any() and (sampling.banned_ids == -1).all()
