"""n samples of one prompt: each is what it would be if it were computed by itself, whatever the engine does to the group."""

import random

import pytest
from engines import (
    Request,
    abort_after_each_number_of_steps,
    assert_same,
    break_steps,
    count_swaps,
    make_engine,
    run,
    separately,
)

from jpaged.engine import LLMEngine
from jpaged.outputs import CompletionOutput, TokenDelta
from jpaged.sampling_params import SamplingParams
from jpaged.swap_space import SwappedGroup


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2} | fields)


def group_requests() -> list[Request]:
    """Groups and single requests, greedy and sampled, with prompts around the edges of a block of 16."""
    rng = random.Random(1)
    kinds = [
        {"n": 4, "seed": 5},
        {"n": 3, "temperature": 0.0},
        {"n": 1, "seed": 6},
        {"n": 4, "seed": 7, "temperature": 0.7, "top_p": 0.9, "max_tokens": 9},
        {"n": 2, "seed": 8, "top_k": 7, "min_p": 0.05},
    ]
    lengths = [17, 31, 16, 3, 40]
    return [
        Request([rng.randrange(3, 250) for _ in range(length)], params(**kind)) for length, kind in zip(lengths, kinds)
    ]


@pytest.fixture(scope="module")
def expected(engine) -> list[CompletionOutput]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return separately(engine, group_requests(), monkeypatch)


def assert_logprobs_close(first: list[CompletionOutput], second: list[CompletionOutput]) -> None:
    for a, b in zip(first, second, strict=True):
        if a.token_ids == b.token_ids:
            assert b.cumulative_logprob == pytest.approx(a.cumulative_logprob, abs=1e-3)
            for one, other in zip(a.logprobs, b.logprobs, strict=True):
                assert next(iter(one.values())).logprob == pytest.approx(next(iter(other.values())).logprob, abs=1e-3)


def check_equal(engine: LLMEngine, expected: list[CompletionOutput], *, times: int = 1) -> None:
    requests, expected = times * group_requests(), times * expected
    got = run(engine, requests, check_every_step=True)
    assert [output.index for output in got] == [i for request in requests for i in range(request.params.n)]
    assert_same(expected, got)
    assert_logprobs_close(expected, got)


def test_forked_samples_equal_samples_computed_separately(engine, expected):
    check_equal(engine, expected)
    greedy = [output.token_ids for output in expected[4:7]]
    assert greedy[0] == greedy[1] == greedy[2]
    assert len({tuple(output.token_ids) for output in expected[:4]}) == 4


def test_a_sample_is_the_same_whatever_n_is(engine, expected):
    first = group_requests()[0]
    for n in (1, 2, 3, 6):
        got = run(engine, [Request(first.prompt, params(**vars(first.params) | {"n": n}))])
        assert_same(expected[: min(n, 4)], got[:4])


SMALL = [
    {"async_scheduling": True, "enable_prefix_caching": True, "preemption_mode": "swap"},
    {"async_scheduling": False, "enable_prefix_caching": False, "preemption_mode": "recompute"},
]


@pytest.mark.parametrize("options", SMALL, ids=["overlap, caching, swap", "none of them"])
def test_preempted_every_few_steps_equals_not_preempted(model, programs_dir, expected, options):
    small = make_engine(
        model,
        programs_dir,
        block_size=4,
        num_blocks_override=20,
        max_model_len=60,
        max_num_batched_tokens=16,
        **options,
    )
    swaps = count_swaps(small)
    check_equal(small, expected, times=3)
    assert small.scheduler.num_preemptions >= 3
    assert any(isinstance(swapped, SwappedGroup) for swapped in swaps) == (options["preemption_mode"] == "swap")
    small.close()


def test_several_decodes_in_a_row_change_no_sample(model, programs_dir, engine):
    requests = [Request(r.prompt, params(**vars(r.params) | {"logprobs": None})) for r in group_requests()]
    long = make_engine(model, programs_dir, num_scheduler_steps=5, num_blocks_override=20, max_model_len=192)
    got = [output.token_ids for output in run(long, requests, check_every_step=True)]
    long.close()
    assert got == [output.token_ids for output in run(engine, requests)]


def test_stops_are_each_samples_own(engine, expected):
    first = group_requests()[0]
    stop_token, word = expected[1].token_ids[6], expected[2].text[5:8]
    stopping = params(**vars(first.params) | {"stop_token_ids": (stop_token,), "stop": (word,)})
    got = run(engine, [Request(first.prompt, stopping)], check_every_step=True)
    assert (got[1].finish_reason, got[1].stop_reason) == ("stop", stop_token) and len(got[1].token_ids) <= 7
    assert (got[2].finish_reason, got[2].stop_reason) == ("stop", word)
    assert got[2].text == expected[2].text[: expected[2].text.index(word)]
    for output, whole in zip(got, expected):
        assert whole.token_ids[: len(output.token_ids)] == output.token_ids
        assert output.finish_reason == "stop" or output.token_ids == whole.token_ids


def test_the_best_of_several_come_first_and_alone(engine):
    first = group_requests()[0]
    every = run(engine, [Request(first.prompt, params(seed=5, n=6))])
    best = run(engine, [Request(first.prompt, params(seed=5, n=2, best_of=6))])
    ranked = sorted(every, key=lambda output: -output.cumulative_logprob)[:2]
    assert [output.token_ids for output in best] == [output.token_ids for output in ranked]
    assert [output.index for output in best] == [0, 1] and best[0].logprobs == ranked[0].logprobs
    quiet = run(engine, [Request(first.prompt, params(seed=5, n=2, best_of=6, logprobs=None))])
    assert [output.token_ids for output in quiet] == [output.token_ids for output in best]
    assert quiet[0].logprobs is None and quiet[0].text == best[0].text


@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_at_every_step_leaves_no_block_behind(engine, overlap):
    engine.in_flight._depth = 1 if overlap else 0
    prompt = list(range(3, 80))  # two chunks
    stays, goes = Request(prompt[:20], params(n=1, max_tokens=12)), Request(prompt, params(n=4, max_tokens=6))
    assert abort_after_each_number_of_steps(engine, stays, goes) > 6
    engine.in_flight._depth = 1


def test_a_group_that_could_never_fit_is_refused_with_the_numbers(engine):
    with pytest.raises(ValueError, match=r"^n is 9; the limit is 8 \(max_num_seqs\)$"):
        engine.validate([5] * 10, params(n=9))
    needed, usable, longest = (265, 254, 25) if engine.kv.has_windows else (209, 127, 16)
    with pytest.raises(
        ValueError, match=rf"^8 samples \(n\) of 20 prompt tokens and 400 more need {needed} blocks .* has {usable}$"
    ):
        engine.validate([5] * 20, params(n=8, max_tokens=400))
    engine.validate([5] * 20, params(n=4, max_tokens=400))
    assert engine.validate.max_tokens(20, params(n=8, max_tokens=None)) == longest * 16 - 20 + 1
    engine.validate([5] * 20, params(n=8, max_tokens=None))
    with pytest.raises(ValueError, match="8 samples"):
        engine.validate([5] * 20, params(n=8, max_tokens=None, min_tokens=16 * longest))


def test_a_step_that_fails_costs_a_group_nothing(engine, expected, monkeypatch):
    break_steps(engine, monkeypatch, lambda number, step: number in (1, 4))
    check_equal(engine, expected)


def test_a_sample_that_fails_in_the_step_in_which_the_other_stops_by_text_ends_once(engine):
    """The engine still counts the other as running, and gives out an end of its own for it."""
    params = SamplingParams(n=2, stop="a", max_tokens=9)
    engine.add_request("both", [5, 6], params)
    [stops, fails, surplus] = [
        TokenDelta("both", 1, engine.tokenizer.encode("a", add_special_tokens=False), 0.0),
        *(TokenDelta("both", i, [], 0.0, finish_reason="error", error="no luck") for i in (0, 1)),
    ]
    ends = [(delta.index, delta.finish_reason) for delta in engine.read([stops, fails, surplus])]
    assert ends == [(1, "stop"), (0, "error")]
    engine.abort("both")
    assert not engine.requests and engine.kv.pool.num_used == 0
