"""Beam search: what Hugging Face finds, and what a search without any shared state finds, whatever the engine does."""

import json
import math
import random
from pathlib import Path

import pytest
from engines import (
    Request,
    abort_after_each_number_of_steps,
    break_steps,
    count_swaps,
    make_engine,
    run,
)

from jpaged.config import DEFAULT_MODEL
from jpaged.engine import LLMEngine
from jpaged.llm import LLM
from jpaged.outputs import CompletionOutput
from jpaged.sampling_params import SamplingParams
from jpaged.swap_space import SwappedGroup

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "smollm2_beams.json").read_text())
CLOSE = 1e-3


def beams(width: int, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "n": width, "use_beam_search": True, "max_tokens": 10} | fields)


@pytest.fixture(scope="module")
def requests(engine) -> list[Request]:
    """Beams of several widths among sampled groups and single requests; two searches meet their stop tokens."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (15, 9, 33, 20, 16)]
    sampled = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 18}

    def stops(prompt: list[int], width: int) -> tuple[int, ...]:
        """Some of what the beams come to where nothing stops them."""
        unstopped = run(engine, [Request(prompt, beams(width, ignore_eos=True))])
        return tuple({output.token_ids[at] for output, at in zip(unstopped, (4, 6, 8))})

    kinds = [
        beams(4, ignore_eos=True, max_tokens=14),
        SamplingParams(n=3, seed=3, **sampled),
        beams(2, stop_token_ids=stops(prompts[2], 2), early_stopping=True),
        SamplingParams(seed=4, **sampled),
        beams(3, stop_token_ids=stops(prompts[4], 3), length_penalty=0.5, max_tokens=20, early_stopping="never"),
    ]
    return [Request(prompt, kind) for prompt, kind in zip(prompts, kinds)]


def score(output: CompletionOutput, params: SamplingParams) -> float:
    return output.cumulative_logprob / len(output.token_ids) ** params.length_penalty


def plain_search(engine: LLMEngine, request: Request) -> list[tuple[float, list[int]]]:
    """The canonical loop over whole token lists, each step a batch of independent requests; (score, tokens) best first."""
    params = request.params
    width, stops = (
        params.n,
        set(params.stop_token_ids) | (set() if params.ignore_eos else engine.tokenizer.eos_token_ids),
    )
    running, ended, never = [(0.0, [])], [], params.early_stopping == "never" and params.length_penalty > 0
    for length in range(1, params.max_tokens + 1):
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
        steps = run(engine, [Request(request.prompt + tokens, one) for _, tokens in running])
        found = [
            (total + entry.logprob, [*tokens, token])
            for (total, tokens), output in zip(running, steps)
            for token, entry in output.logprobs[0].items()
        ]
        found.sort(key=lambda pair: -pair[0])
        for total, tokens in found[:width]:
            if tokens[-1] in stops or length == params.max_tokens:
                ended.append((total / length**params.length_penalty, tokens))
        ended = sorted(ended, key=lambda pair: -pair[0])[:width]
        running = [pair for pair in found if pair[1][-1] not in stops][:width]
        best = running[0][0] / (params.max_tokens if never else length) ** params.length_penalty
        if len(ended) == width and (params.early_stopping is True or best <= ended[-1][0]):
            break
    return ended


@pytest.fixture(scope="module")
def expected(engine, requests) -> list[CompletionOutput]:
    """Each request by itself."""
    return [output for request in requests for output in run(engine, [request], check_every_step=True)]


def assert_equal(got: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    assert [(o.index, o.token_ids, o.finish_reason, o.stop_reason, o.text) for o in got] == [
        (o.index, o.token_ids, o.finish_reason, o.stop_reason, o.text) for o in expected
    ]
    for one, other in zip(got, expected):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=CLOSE)


def test_beams_are_those_of_a_search_that_shares_nothing(engine, requests, expected):
    outputs = iter(expected)
    for request in requests:
        own = [next(outputs) for _ in range(request.params.n)]
        if request.params.use_beam_search:
            plain = plain_search(engine, request)
            assert [output.token_ids for output in own] == [tokens for _, tokens in plain]
            for output, (total, _) in zip(own, plain):
                assert score(output, request.params) == pytest.approx(total, abs=CLOSE)
    reasons = [output.finish_reason for output in expected]
    assert reasons.count("stop") >= 2 and reasons.count("length") > 4


def test_beams_among_neighbours_are_those_alone(engine, requests, expected):
    assert_equal(run(engine, requests, check_every_step=True), expected)


SMALL = [
    {"async_scheduling": True, "enable_prefix_caching": True, "preemption_mode": "swap"},
    {"async_scheduling": False, "enable_prefix_caching": False, "preemption_mode": "recompute"},
]


@pytest.mark.parametrize("options", SMALL, ids=["overlap, caching, swap", "none of them"])
def test_preempted_beams_are_those_that_were_not(model, programs_dir, requests, expected, options):
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
    assert_equal(run(small, 3 * requests, check_every_step=True), 3 * expected)
    assert small.scheduler.num_preemptions > 2
    assert any(isinstance(swapped, SwappedGroup) for swapped in swaps) == (options["preemption_mode"] == "swap")
    small.close()


def check_fixture(engine: LLMEngine, cases: list[dict]) -> None:
    assert engine.tokenizer.eos_token_ids == {FIXTURE["eos_token_id"]}
    asked = [
        Request(
            case["prompt_token_ids"],
            beams(
                case["num_beams"],
                max_tokens=case["max_new_tokens"],
                length_penalty=case["length_penalty"],
                early_stopping=case["early_stopping"],
            ),
        )
        for case in cases
    ]
    outputs = iter(run(engine, asked))
    for case, request in zip(cases, asked):
        for want in case["outputs"]:
            got = next(outputs)
            assert got.token_ids == want["token_ids"], case["name"]
            # under a negative penalty the score is a multiple of the log-probs' sum, which is what is close
            close = CLOSE * max(1, len(got.token_ids) ** -case["length_penalty"])
            assert score(got, request.params) == pytest.approx(want["score"], abs=close), case["name"]


@pytest.fixture(scope="module")
def smollm2(programs_dir):
    engine = make_engine(
        DEFAULT_MODEL, programs_dir, max_num_seqs=20, max_num_batched_tokens=256, token_buckets=(20, 256),
        num_blocks_override=192,
    )  # fmt: skip
    yield engine
    engine.close()


def test_beams_are_hugging_faces(smollm2):
    check_fixture(smollm2, [FIXTURE["cases"][number] for number in (0, 29)])  # each has outputs that end with EOS


@pytest.mark.slow
def test_beams_are_hugging_faces_on_every_prompt(smollm2):
    check_fixture(smollm2, FIXTURE["cases"])


@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_at_every_step_leaves_no_block_behind(engine, overlap):
    engine.in_flight._depth = 1 if overlap else 0
    prompt = list(range(3, 80))  # two chunks
    stays, goes = (
        Request(prompt[:20], SamplingParams(max_tokens=12, ignore_eos=True)),
        Request(prompt, beams(4, max_tokens=5, ignore_eos=True)),
    )
    assert abort_after_each_number_of_steps(engine, stays, goes) > 6
    engine.in_flight._depth = 1


def test_a_failed_step_in_a_search_changes_nothing(engine, requests, expected, monkeypatch):
    break_steps(engine, monkeypatch, lambda number, step: number in (3, 9))
    assert_equal(run(engine, requests, check_every_step=True), expected)


def test_the_offline_door_gives_the_beams_best_first(engine, requests):
    llm = LLM.__new__(LLM)
    llm.engine, llm._request_numbers = engine, iter(range(100))
    prompt = requests[0].prompt
    (output,) = llm.beam_search(prompt, beam_width=3, max_tokens=6, length_penalty=0.5, use_tqdm=False)
    scores = [one.cumulative_logprob / math.sqrt(len(one.token_ids)) for one in output.outputs]
    assert output.finished and scores == sorted(scores, reverse=True) and len(set(scores)) == 3
    assert [one.text for one in output.outputs] == [engine.tokenizer.decode(one.token_ids) for one in output.outputs]


def test_beams_that_need_more_log_probs_than_there_are_are_refused(engine):
    with pytest.raises(
        ValueError, match=r"^n is 30 beams, which need 31 log-probs .* the limit is 20 \(max_logprobs\)$"
    ):
        engine.validate([5] * 4, beams(30, ignore_eos=True))
    with pytest.raises(ValueError, match=r"^n is 9; the limit is 8 \(max_num_seqs\)$"):
        engine.validate([5] * 4, beams(9, ignore_eos=True))
    with pytest.raises(ValueError, match="8 samples"):
        engine.validate([5] * 20, beams(8, max_tokens=400))
