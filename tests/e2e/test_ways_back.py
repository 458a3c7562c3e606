"""Whichever way back a preempted request takes, its tokens and log-probs are those that it would have had."""

import logging
import random

import pytest
from engines import Request, assert_equal, break_steps, count_swaps, layer_types, make_engine, run

from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason
from jpaged.swap_space import CHUNK, SwappedGroup

GIB = 2**30
SMALL = {
    4: (30, 60),
    16: (14, 60),
    64: (9, 160),
}  # block size: (blocks, output tokens); somebody has to go all the time


def requests(block_size: int, max_tokens: int) -> list[Request]:
    """Greedy and seeded, some with a common beginning, around the edges of blocks."""
    rng = random.Random(0)
    common = [rng.randrange(256) for _ in range(2 * block_size)]
    lengths = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 3, 3 * block_size]
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 6}]
    made = []
    for i, length in enumerate(lengths):
        own = [rng.randrange(256) for _ in range(length)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2, **kinds[i % len(kinds)])
        made.append(Request((common + own)[-length - block_size :] if i % 2 else own, params))
        made.append(Request(common + own[:7], params))
    return made


def check_matrix(model, programs_dir, block_size, cache_dtype, overlaps, cachings):
    num_blocks, max_tokens = SMALL[block_size]
    longest = 4 * block_size + max_tokens + 4
    options = {"block_size": block_size, "kv_cache_dtype": cache_dtype}
    enough = 200 if block_size == 4 else 128  # where that is enough, other tests' programs serve
    roomy = make_engine(model, programs_dir, enable_prefix_caching=False, num_blocks_override=enough, **options)
    load = requests(block_size, max_tokens)
    expected = run(roomy, load)
    assert roomy.scheduler.num_preemptions == 0
    roomy.close()
    for overlap in overlaps:
        for caching in cachings:
            for mode in ("recompute", "swap"):
                engine = make_engine(
                    model, programs_dir, num_blocks_override=num_blocks, preemption_mode=mode,
                    async_scheduling=overlap, enable_prefix_caching=caching, max_model_len=longest, **options,
                )  # fmt: skip
                swaps = count_swaps(engine)
                got = run(engine, load, check_every_step=True)
                assert_equal(expected, got)
                assert engine.kv.swap_space.num_used == 0
                if caching:
                    hits = engine.metrics.prefix_cache_hits
                    assert_equal(expected, run(engine, load, check_every_step=True))
                    assert engine.metrics.prefix_cache_hits > hits
                least = 1 if engine.kv.has_windows else 5
                assert engine.scheduler.num_preemptions >= least, "the pool was meant to be too small"
                assert len(swaps) == (engine.scheduler.num_preemptions if mode == "swap" else 0)
                engine.close()


def test_recomputed_swapped_and_left_alone_are_the_same(model, programs_dir):
    check_matrix(model, programs_dir, 16, "auto", [True], [True])


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16"])
def test_in_any_pool_the_ways_back_are_the_same(model, programs_dir, block_size, cache_dtype):
    check_matrix(model, programs_dir, block_size, cache_dtype, [True, False], [True, False])


@pytest.fixture(scope="module")
def swapping(model, programs_dir):
    """The engine of the first test, so that nothing more is compiled: blocks of 16, 13 usable, 128 tokens at most."""
    engine = make_engine(
        model, programs_dir, num_blocks_override=14, max_model_len=128, preemption_mode="swap",
        scheduling_policy="priority",
    )  # fmt: skip
    yield engine
    engine.close()


def add(engine, number: int, length: int = 30, max_tokens: int = 90, **params) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | params)
    engine.add_request(str(number), [number + 1] * length, params)


def step_until(engine, condition) -> None:
    for _ in range(1000):
        if condition():
            return
        engine.step()
    raise AssertionError("it did not happen")


def swapped(engine) -> list:
    return [seq for seq in engine.scheduler.waiting if seq.swapped is not None]


def finish(engine) -> None:
    while engine.has_work:
        engine.step()
        engine.kv.check_invariants(engine.scheduler.sequences)
    assert engine.kv.pool.num_used == engine.kv.swap_space.num_used == 0 and not engine.requests


def test_no_new_request_is_admitted_while_a_swapped_out_one_waits(swapping):
    for number in range(3):
        add(swapping, number)
    step_until(swapping, lambda: swapped(swapping))
    (victim,) = swapped(swapping)
    assert victim.request_id == "2"
    add(swapping, 9, length=1, max_tokens=1)  # small enough to fit at any time
    running = {"0", "1"}
    while victim.swapped is not None:
        assert {seq.request_id for seq in swapping.scheduler.running} <= running
        swapping.step()
    finish(swapping)


def test_a_higher_priority_goes_before_those_that_were_swapped_out(swapping):
    for number in range(3):
        add(swapping, number)
    step_until(swapping, lambda: swapped(swapping))
    add(swapping, 9, length=1, max_tokens=1, priority=-1)
    step_until(swapping, lambda: "9" not in swapping.requests)
    assert swapped(swapping)
    finish(swapping)


@pytest.mark.parametrize("which", [0, 1, 2, None])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_an_abort_at_any_step_leaves_no_block_behind(swapping, which, every):
    """which: the request that is aborted; None for all."""
    while_swapped = 0
    for num_steps in range(0, 160, every):
        for number in range(3):
            add(swapping, number)
        for _ in range(num_steps):
            swapping.step()
        while_swapped += bool(swapped(swapping))
        for number in range(3) if which is None else [which]:
            swapping.abort(str(number))
        swapping.kv.check_invariants(swapping.scheduler.sequences)
        if which is None:
            assert swapping.kv.pool.num_used == swapping.kv.swap_space.num_used == 0
            step_until(swapping, lambda: not swapping.has_work)
        finish(swapping)
    assert while_swapped >= 3


@pytest.mark.parametrize("kind", [{"temperature": 1, "seed": 3}, {"use_beam_search": True}], ids=["samples", "beams"])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_an_abort_of_a_group_while_it_is_swapped_out_leaves_no_block_behind(swapping, kind, every):
    while_swapped = 0
    for num_steps in range(0, 160, every):
        add(swapping, 0)
        add(swapping, 1)
        add(swapping, 2, max_tokens=60, n=2, **kind)
        for _ in range(num_steps):
            swapping.step()
        while_swapped += any(isinstance(seq.swapped, SwappedGroup) for seq in swapping.scheduler.waiting)
        swapping.abort("2")
        swapping.kv.check_invariants(swapping.scheduler.sequences)
        finish(swapping)
    assert while_swapped >= 3


def test_where_no_memory_is_pinned_blocks_wait_in_numpy_arrays(swapping, monkeypatch):
    load = [
        Request([number + 1] * 30, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)) for number in range(3)
    ]
    expected = [output.token_ids for output in run(swapping, load)]
    before = swapping.metrics.num_swapped_out
    monkeypatch.setattr(swapping.runner._swapper, "_host", None)
    assert [output.token_ids for output in run(swapping, load, check_every_step=True)] == expected
    assert swapping.metrics.num_swapped_out > before


def test_a_failed_step_drops_what_was_on_its_way_to_host_memory(swapping, monkeypatch):
    def outputs() -> dict[str, list[int]]:
        tokens = {}
        for number in range(3):
            add(swapping, number)
        while swapping.has_work:
            for delta in swapping.step():
                assert delta.finish_reason in (None, FinishReason.LENGTH)
                tokens[delta.request_id] = tokens.get(delta.request_id, []) + delta.token_ids
        return tokens

    expected, broken = outputs(), []

    def breaks(number, step):
        is_first = bool(step.swapped_out) and not broken
        broken.extend([number] * is_first)
        return is_first

    break_steps(swapping, monkeypatch, breaks)
    assert outputs() == expected and broken
    finish(swapping)


def test_host_memory_is_bounded_and_who_does_not_fit_is_recomputed(model, programs_dir):
    num_places = 2 // len(layer_types(model))  # in a block
    bytes_per_block = 16 * 2 * 2 * 16 * 4 * num_places
    engine = make_engine(
        model, programs_dir, num_blocks_override=14, max_model_len=128, preemption_mode="swap",
        swap_space=CHUNK * bytes_per_block / GIB,
    )  # fmt: skip
    assert engine.kv.swap_space.capacity == CHUNK
    swaps = count_swaps(engine)
    for number in range(6):
        add(engine, number)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.kv.swap_space.num_used)
        engine.kv.check_invariants(engine.scheduler.sequences)
    assert most == CHUNK and 0 < len(swaps) < engine.scheduler.num_preemptions
    finish(engine)
    engine.close()


def test_swapping_needs_room_for_a_chunk(model, programs_dir):
    with pytest.raises(ValueError, match=r"swap_space \(0 GiB\) holds 0 blocks; preemption_mode swap needs at least 8"):
        make_engine(model, programs_dir, max_model_len=128, preemption_mode="swap", swap_space=0)


def test_the_way_back_is_chosen_by_an_estimate_that_is_logged(model, programs_dir, caplog):
    engine = make_engine(model, programs_dir, num_blocks_override=14, max_model_len=128)
    assert engine.config.preemption_mode == "auto"
    for number in range(3):
        add(engine, number)
    with caplog.at_level(logging.WARNING):
        finish(engine)
    lines = [r.getMessage() for r in caplog.records if r.name == "jpaged.preemption"]
    assert len(lines) == engine.scheduler.num_preemptions > 0
    assert all("will be recomputed (moving " in line and "blocks out and in: " in line for line in lines), lines
    engine.close()
