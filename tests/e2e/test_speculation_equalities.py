"""Speculation changes no token and no log-prob, whatever else happens to a request."""

import dataclasses
import math
import random

import pytest
from engines import Request, abort_after_each_number_of_steps, assert_same, make_engine, run
from tiny_model import make_tiny_model, random_weights

from jpaged.config import DEFAULT_MODEL
from jpaged.output_processor import RequestOutputBuilder
from jpaged.program_cache import compile_counter
from jpaged.sampling_params import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny model that soon repeats itself: attention and MLP add little to a token."""
    weights = random_weights()
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0.3
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), weights=weights))


@pytest.fixture(scope="module")
def plain(model, programs_dir):
    engine = make_engine(model, programs_dir)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def speculating(model, programs_dir):
    engine = make_engine(model, programs_dir, speculative_config=NGRAM)
    yield engine
    engine.close()


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 2} | fields)


def mixed_requests() -> list[Request]:
    """Greedy and sampled, also several samples of one prompt: temperatures at which a draft is sometimes right."""
    rng = random.Random(0)
    kinds = [
        {},
        {"temperature": 0.06, "seed": 5},
        {"temperature": 0.07, "top_p": 0.9, "seed": 6},
        {"temperature": 0.06, "n": 4, "seed": 7},
        {"temperature": 0.06, "min_p": 0.05, "top_k": 7, "seed": 8},
    ]
    requests = []
    for i, length in enumerate([3, 15, 40, 17, 60]):
        phrase = [rng.randrange(3, 250) for _ in range(10)]
        requests.append(Request((phrase * 6)[:length], params(**kinds[i])))
    return requests


@pytest.fixture(scope="module")
def expected(plain):
    return run(plain, mixed_requests(), check_every_step=True)


def assert_equal(expected, got) -> None:
    """Tokens, text and ends are the same, and log-probs to the rounding of float32."""
    assert_same(expected, got)
    for want, have in zip(expected, got, strict=True):
        assert (want.token_ids, want.text) == (have.token_ids, have.text)
        assert (want.finish_reason, want.stop_reason) == (have.finish_reason, have.stop_reason)
        for a, b in zip(want.logprobs or [], have.logprobs or [], strict=True):
            assert a.keys() == b.keys()
            assert all(math.isclose(a[token].logprob, b[token].logprob, abs_tol=1e-4) for token in a)


def accepted(engine) -> int:
    stats = engine.stats()
    assert stats["spec_decode_num_accepted_tokens"] <= stats["spec_decode_num_draft_tokens"]
    return stats["spec_decode_num_accepted_tokens"]


def test_drafts_change_no_token_and_no_log_prob(speculating, expected):
    steps = speculating.metrics.snapshot()["iteration_tokens_total_count"]
    before = accepted(speculating)
    assert_equal(expected, run(speculating, mixed_requests(), check_every_step=True))
    assert accepted(speculating) - before > 60, "drafts were meant to be right often"
    assert speculating.stats()["spec_decode_num_draft_tokens"] > accepted(speculating), "and sometimes wrong"
    metrics = speculating.metrics.snapshot()
    assert metrics["spec_decode_num_accepted_tokens"] == accepted(speculating)
    assert metrics["iteration_tokens_total_count"] - steps < 60


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"block_size": 4, "num_blocks_override": 400},
        pytest.param({"block_size": 64, "enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_change_nothing_on_any_engine(model, programs_dir, expected, options):
    """Without overlap, with other blocks and other chunks; small pools are in test_equality_matrix.py."""
    engine = make_engine(model, programs_dir, speculative_config=NGRAM, **options)
    assert_equal(expected, run(engine, mixed_requests(), check_every_step=True))
    assert accepted(engine) > 40
    engine.close()


def stopping_requests(expected) -> list[Request]:
    """The requests again, ended in every way at each token, or character, that comes for the first time."""
    requests = []
    for request, whole in zip([r for r in mixed_requests() if r.params.n == 1], expected, strict=True):
        new = [at for at, token in enumerate(whole.token_ids) if token not in whole.token_ids[:at]]
        letters = [c for at, c in enumerate(whole.text) if c.isascii() and c.isprintable() and c not in whole.text[:at]]
        ways = [{"stop_token_ids": [whole.token_ids[at]]} for at in new]
        ways += [{"stop": c} for c in letters] + [{"stop": c, "min_tokens": 9} for c in letters]
        ways += [{"max_tokens": max_tokens} for max_tokens in range(10, 20)]
        requests += [Request(request.prompt, dataclasses.replace(request.params, **way)) for way in ways]
    return requests


def test_what_ends_inside_an_accepted_draft_ends_where_it_would_without(plain, speculating, expected):
    single = [*expected[:3], expected[-1]]  # four samples come before the last
    requests = stopping_requests(single)
    want, before = run(plain, requests), accepted(speculating)
    generated = speculating.metrics.generation_tokens
    got = run(speculating, requests, check_every_step=True)
    assert_equal(want, got)
    assert accepted(speculating) - before > 2 * len(requests)
    assert {(output.finish_reason, type(output.stop_reason)) for output in want} == {
        ("length", type(None)), ("stop", int), ("stop", str)
    }  # fmt: skip
    assert len({len(output.token_ids) for output in want if output.finish_reason == "stop"}) >= 12
    assert speculating.metrics.generation_tokens - generated == sum(len(output.token_ids) for output in got)


def test_streams_without_log_probs_are_the_same(plain, speculating):
    requests = [Request(r.prompt, dataclasses.replace(r.params, logprobs=None)) for r in mixed_requests()]
    assert_equal(run(plain, requests), run(speculating, requests))


def test_neighbours_that_come_in_chunks_change_nothing(plain, speculating):
    """Long prompts arrive while drafts are verified."""
    rng = random.Random(1)
    late = [Request([rng.randrange(3, 250) for _ in range(150)], params(max_tokens=8)) for _ in range(3)]
    early = mixed_requests()[:3]
    want = run(plain, early + late)
    builders = {}

    def add(requests):
        for request in requests:
            name = str(len(builders))
            builders[name] = RequestOutputBuilder(name, None, request.prompt)
            speculating.add_request(name, request.prompt, request.params)

    add(early)
    num_mixed = num_steps = 0
    while speculating.has_work:
        for delta in speculating.step():
            builders[delta.request_id].add(delta)
        num_mixed += any(
            plan.drafts and plan.num_decodes + len(plan.drafts) < len(plan.num_scheduled_tokens)
            for plan in speculating.scheduler.in_flight
        )
        num_steps += 1
        if num_steps in (12, 16, 20):
            add(late[num_steps // 4 - 3 : num_steps // 4 - 2])
    assert_equal(want, [output for builder in builders.values() for output in builder.output.outputs])
    assert num_mixed > 0, "no step held a draft and a chunk of a prompt"


def test_an_abort_at_any_step_leaves_no_block_behind(speculating):
    greedy, _, _, samples, repeats = mixed_requests()
    assert abort_after_each_number_of_steps(speculating, greedy, samples) > 10
    assert abort_after_each_number_of_steps(speculating, samples, repeats) > 10


def test_speculation_compiles_nothing_after_warm_up(model, programs_dir):
    engine = make_engine(model, programs_dir, speculative_config=NGRAM)
    engine.runner.programs.compile_all()
    engine.runner.programs.is_sealed = True
    before = compile_counter.num_events
    run(engine, mixed_requests() * 3, check_every_step=True)
    assert accepted(engine) > 100
    assert compile_counter.num_events == before
    engine.close()


@pytest.mark.slow
def test_the_real_model_says_the_same_with_drafts(programs_dir):
    text = "The cat sat on the mat. The dog sat on the rug. The cat sat on the mat. The dog"
    kinds = [{}, {"temperature": 0.7, "seed": 1}, {"temperature": 1.0, "top_p": 0.9, "n": 3, "seed": 2}]
    outputs = []
    for options in ({}, {"speculative_config": NGRAM}):
        engine = make_engine(DEFAULT_MODEL, programs_dir, **options)
        prompt = engine.tokenizer.encode(text)
        outputs.append(run(engine, [Request(prompt, params(max_tokens=60, **kind)) for kind in kinds]))
        if options:
            assert accepted(engine) > 40
        engine.close()
    assert_same(*outputs)
