"""Penalties, biases and bans in the engine: what they say, whatever happens to the request and whoever runs beside it."""

import dataclasses
import random

import numpy as np
import pytest
from engines import AMBIGUOUS, Request, assert_same, make_engine, run
from test_logits_edits import reference
from tiny_model import CONFIG

from jpaged.bad_words import bad_word_tokens
from jpaged.sampling_params import SamplingParams

VOCAB = CONFIG["vocab_size"]
LETTERS = range(64, 90)  # a to z


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    engine = make_engine(
        model, programs_dir, enable_prefix_caching=False, max_num_batched_tokens=8, max_logprobs=VOCAB
    )
    yield engine
    engine.close()


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": VOCAB} | fields)


def requests(bad_words=()) -> list[Request]:
    """Every parameter on its own and together, greedy and drawn, and neighbours that use none."""
    rng = random.Random(3)
    kinds = [
        {},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {7: 3.0, 9: -100, 250: 2.5}},
        {"allowed_token_ids": range(60, 90)},
        {"temperature": 1.0, "seed": 4},
        {"bad_words": bad_words, "min_tokens": 20, "stop_token_ids": range(70, 80), "allowed_token_ids": LETTERS},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.7, "logit_bias": {3: 2}, "bad_words": ["a", "bc"]},
    ]
    return [
        Request([rng.randrange(3, 250) for _ in range(rng.choice([1, 15, 16, 33, 60]))], params(**kind))
        for kind in kinds
    ]


@pytest.fixture(scope="module")
def bad_words(engine) -> list[str]:
    """Of one, two and three tokens, which the request says where nobody forbids them."""
    said = run(engine, [requests()[8]])[0].token_ids
    return [engine.tokenizer.decode(said[i : i + n]) for i, n in ((1, 1), (6, 2), (10, 3))]


@pytest.fixture(scope="module")
def expected(engine, bad_words):
    return run(engine, requests(bad_words), check_every_step=True)


def test_greedy_tokens_are_the_best_of_the_edited_distribution(engine, expected, bad_words):
    """Judged by the model's own log-probs, which are returned unedited; repetition_penalty needs the logits themselves."""
    num_changed = 0
    for request, output in zip(requests(bad_words), expected, strict=True):
        if request.params.temperature or request.params.repetition_penalty != 1:
            continue
        for i, token in enumerate(output.token_ids):
            own = np.array([output.logprobs[i][t].logprob for t in range(VOCAB)])
            banned = request.params.stop_token_ids if i < request.params.min_tokens else ()
            words = bad_word_tokens(request.params.bad_words, engine.tokenizer)
            edited = reference(own, request.params, request.prompt, output.token_ids[:i], words, banned)
            assert edited.max() - edited[token] < AMBIGUOUS and np.isfinite(edited[token])
            num_changed += token != own.argmax()
    assert num_changed > 20


def test_a_repetition_penalty_is_felt(engine, expected, bad_words):
    request = requests(bad_words)[4]
    plain = Request(request.prompt, dataclasses.replace(request.params, repetition_penalty=1.0))
    assert run(engine, [plain])[0].token_ids != expected[4].token_ids
    assert len(set(expected[4].token_ids)) > len(set(run(engine, [plain])[0].token_ids))


def test_alone_and_in_any_order_gives_what_it_gives_among_neighbours(engine, expected, bad_words):
    assert_same(expected, [run(engine, [request])[0] for request in requests(bad_words)])
    assert_same(expected, run(engine, requests(bad_words)[::-1])[::-1])


def test_chunks_preemptions_cached_prefixes_and_a_wait_for_a_slot_change_nothing(
    model, programs_dir, expected, bad_words
):
    small = make_engine(
        model, programs_dir, max_num_batched_tokens=12, num_blocks_override=9, max_model_len=112, max_num_edited_seqs=4,
        max_logprobs=VOCAB,
    )  # fmt: skip
    for _ in range(2):
        assert_same(expected, run(small, requests(bad_words), check_every_step=True))
    snapshot = small.metrics.snapshot()
    assert small.scheduler.num_preemptions > 0 and snapshot["prefix_cache_hits"] > 0
    small.close()


@pytest.mark.parametrize(("overlap", "num_steps"), [(False, 1), (False, 5), (True, 5)])
def test_overlap_and_several_decodes_in_a_row_change_nothing(
    model, programs_dir, expected, bad_words, overlap, num_steps
):
    other = make_engine(
        model, programs_dir, async_scheduling=overlap, num_scheduler_steps=num_steps, max_num_batched_tokens=8,
        max_logprobs=VOCAB,
    )  # fmt: skip
    wanted = None if num_steps > 1 else VOCAB  # log-probs are returned of one decode in a row
    plain = [Request(r.prompt, dataclasses.replace(r.params, logprobs=wanted)) for r in requests(bad_words)]
    outputs = run(other, plain, check_every_step=True)
    assert_same(expected, outputs)
    other.close()


def test_the_mix_compiles_nothing(engine, bad_words):
    keys = engine.runner.programs.num_compiled
    for request in requests(bad_words):
        run(engine, [request])
    assert engine.runner.programs.num_compiled == keys
