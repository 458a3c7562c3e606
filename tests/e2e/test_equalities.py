"""The engine's specification: whatever it does to a request, the tokens are the same. On a tiny model and a real one."""

import dataclasses
import random

import pytest
from engines import Request, assert_same, make_engine, run
from tiny_model import CONFIG, WITH_WINDOW, make_tiny_model

from jpaged.config import DEFAULT_MODEL
from jpaged.sampling_params import SamplingParams

SLOW_WINDOW = pytest.param("window", marks=pytest.mark.slow)
costly = pytest.mark.parametrize(  # many programs: the real model's take minutes to compile
    "model",
    ["tiny", SLOW_WINDOW, pytest.param(DEFAULT_MODEL, marks=pytest.mark.slow)],
    indirect=True,
    scope="module",
)


TINY = {"tiny": CONFIG, "window": WITH_WINDOW}


@pytest.fixture(scope="module", params=["tiny", SLOW_WINDOW, pytest.param(DEFAULT_MODEL, marks=pytest.mark.long)])
def model(request, tmp_path_factory) -> str:
    if request.param == DEFAULT_MODEL:
        return DEFAULT_MODEL
    return str(make_tiny_model(tmp_path_factory.mktemp(request.param), TINY[request.param]))


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2} | fields)


def mixed_requests() -> list[Request]:
    """Greedy and sampled, with and without filters, of many lengths, around the edges of a block of 16."""
    rng = random.Random(0)
    lengths = [1, 15, 16, 17, 33, 50, 70, 90]
    kinds = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "seed": 6},
        {"temperature": 1.2, "top_k": 7, "min_p": 0.05, "seed": 7},
    ]
    return [
        Request([rng.randrange(3, 250) for _ in range(length)], params(**kinds[i % len(kinds)]))
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(engine):
    return run(engine, mixed_requests(), check_every_step=True)


def test_a_request_alone_gives_what_it_gives_among_neighbours(engine, expected):
    alone = [run(engine, [request])[0] for request in mixed_requests()]
    assert_same(expected, alone)


def test_the_order_of_neighbours_changes_nothing(engine, expected):
    assert_same(expected, run(engine, mixed_requests()[::-1])[::-1])


def test_chunked_prefill_equals_whole_prefill(model, programs_dir, expected):
    chunked = make_engine(model, programs_dir, max_num_batched_tokens=12, enable_prefix_caching=False)
    assert_same(expected, run(chunked, mixed_requests(), check_every_step=True))
    chunked.close()


@costly
def test_prefill_that_is_never_chunked_equals_chunked(model, programs_dir, expected):
    whole = make_engine(
        model, programs_dir, max_num_batched_tokens=128, max_model_len=128, enable_chunked_prefill=False, enable_prefix_caching=False
    )  # fmt: skip
    assert_same(expected, run(whole, mixed_requests()))
    whole.close()


def test_a_prefix_cache_hit_equals_a_cold_prompt(model, programs_dir, expected):
    caching = make_engine(model, programs_dir)
    assert_same(expected, run(caching, mixed_requests(), check_every_step=True))
    assert caching.metrics.snapshot()["prefix_cache_hits"] == 0
    assert_same(expected, run(caching, mixed_requests(), check_every_step=True))
    num_full_blocks = sum((len(request.prompt) - 1) // 16 for request in mixed_requests())
    assert caching.metrics.snapshot()["prefix_cache_hits"] == 16 * num_full_blocks
    caching.close()


@costly
def test_preempted_by_recompute_equals_not_preempted(model, programs_dir, expected):
    small = make_engine(model, programs_dir, num_blocks_override=14, max_model_len=128, enable_prefix_caching=False)
    assert_same(expected, run(small, mixed_requests(), check_every_step=True))
    assert small.scheduler.num_preemptions > 0
    small.close()


@costly
def test_preemption_with_a_prefix_cache_changes_nothing(model, programs_dir, expected):
    small = make_engine(model, programs_dir, num_blocks_override=14, max_model_len=128)
    assert_same(expected, run(small, mixed_requests(), check_every_step=True))
    assert small.scheduler.num_preemptions > 0
    small.close()


def stopping_requests(expected) -> list[Request]:
    """Requests that end in every way that the host learns of late, at tokens that they are known to reach."""
    requests = []
    for number, (request, whole) in enumerate(zip(mixed_requests(), expected)):
        token = whole.token_ids[5 + number]
        ways = [
            {"stop_token_ids": [token]},
            {"stop_token_ids": [token], "min_tokens": 9 + number},
            {"stop": whole.text[8:11] or "x"},
            {"max_tokens": 1 + number},
        ]
        fields = {name: getattr(request.params, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
        requests.append(Request(request.prompt, params(**fields | ways[number % len(ways)])))
    return requests


@costly
def test_overlap_on_equals_overlap_off(model, programs_dir, engine, expected):
    """Also on a pool so small that sequences are preempted while others stop in a step in flight."""
    assert engine.config.async_scheduling
    outputs = {}
    for overlap in (True, False):
        small = make_engine(model, programs_dir, num_blocks_override=14, max_model_len=128, async_scheduling=overlap)
        requests = mixed_requests() + stopping_requests(expected)
        outputs[overlap] = run(small, requests, check_every_step=True)
        assert small.scheduler.num_preemptions > 0
        small.close()
    assert_same(expected, outputs[True][: len(expected)])
    assert_same(outputs[False], outputs[True])
    for with_overlap, without in zip(outputs[True], outputs[False]):
        assert with_overlap.finish_reason == without.finish_reason
        assert (with_overlap.text, with_overlap.stop_reason) == (without.text, without.stop_reason)
    reasons = {(output.finish_reason, type(output.stop_reason)) for output in outputs[True]}
    assert reasons >= {("length", type(None)), ("stop", int), ("stop", str)}


@costly
@pytest.mark.parametrize("overlap", [True, False])
def test_several_decodes_in_a_row_change_nothing(model, programs_dir, expected, overlap):
    """Also where sequences stop in the middle of such a run, and where blocks run out."""
    long = make_engine(
        model, programs_dir, num_scheduler_steps=5, async_scheduling=overlap, num_blocks_override=20, max_model_len=192
    )

    def plain(requests):
        return [Request(r.prompt, dataclasses.replace(r.params, logprobs=None)) for r in requests]

    requests = plain(mixed_requests() + stopping_requests(expected))
    outputs = run(long, requests, check_every_step=True)
    one_by_one = make_engine(model, programs_dir)
    for got, want in zip(outputs, run(one_by_one, requests), strict=True):
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    before = long.metrics.snapshot()["iteration_tokens_total_count"]
    run(long, plain(mixed_requests()[:2]))  # 24 tokens each, one prefill and then five at a time
    assert long.metrics.snapshot()["iteration_tokens_total_count"] - before <= 8
    long.close()
    one_by_one.close()


def test_a_seed_repeats_its_draws_and_another_seed_does_not(engine):
    def draw(seed):
        request = Request([5, 6, 7], params(temperature=1.0, seed=seed, logprobs=None))
        return run(engine, [request])[0].token_ids

    assert draw(11) == draw(11)
    assert draw(11) != draw(12)


def test_requests_without_a_seed_differ_from_one_another(engine):
    outputs = run(engine, [Request([5, 6, 7], params(temperature=1.0)) for _ in range(4)])
    assert len({tuple(output.token_ids) for output in outputs}) == 4
