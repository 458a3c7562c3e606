"""A user's function between the model and the sampler: it decides its own request, and nothing else."""

import dataclasses

import numpy as np
import pytest
from engines import Request, assert_same, make_engine, run
from tiny_model import CONFIG

from jpaged.sampling_params import SamplingParams

VOCAB = CONFIG["vocab_size"]


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def engine(request, model, programs_dir):
    engine = make_engine(
        model, programs_dir, async_scheduling=request.param, max_num_batched_tokens=8, max_logprobs=VOCAB,
        num_blocks_override=8, max_model_len=112,
    )  # fmt: skip
    yield engine
    engine.close()


def params(*processors, **fields) -> SamplingParams:
    defaults = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "logprobs": VOCAB}
    return SamplingParams(**defaults | fields, logits_processors=processors)


def biased(output_token_ids, logits):
    """What logit_bias {7: 3, 9: -100} does."""
    logits[7] += 3
    logits[9] -= 100
    return logits


def parity(output_token_ids, logits):
    """Lets even and odd tokens take turns: it needs the whole output."""
    logits[len(output_token_ids) % 2 :: 2] = -np.inf
    return logits


NEIGHBOURS = [
    Request([5, 6, 7] * 6, params()),
    Request([9] * 20, params(temperature=1.0, seed=3, top_p=0.9, presence_penalty=1.0)),
    Request([1], params(repetition_penalty=1.3, max_tokens=30)),
]


def test_a_processor_that_does_nothing_changes_nothing(engine):
    kinds = [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "seed": 5, "frequency_penalty": 1.5, "min_tokens": 9},
    ]
    plain = [Request([3, 4, 5] * n, params(**kind)) for n, kind in enumerate(kinds, start=1)]
    passive = [
        Request(r.prompt, dataclasses.replace(r.params, logits_processors=[lambda ids, row: row])) for r in plain
    ]
    expected = run(engine, plain)
    outputs = run(engine, [*NEIGHBOURS, *passive], check_every_step=True)[len(NEIGHBOURS) :]
    assert_same(expected, outputs)
    for got, want in zip(outputs, expected, strict=True):
        for one, other in zip(got.logprobs, want.logprobs, strict=True):
            assert all(one[t].logprob == pytest.approx(other[t].logprob, abs=1e-4) for t in other)


def test_a_processor_equals_the_bias_that_it_adds_and_logprobs_stay_the_models_own(engine):
    bias = run(engine, [Request([3, 4, 5], params(logit_bias={7: 3, 9: -100}))])[0]
    own = run(engine, [Request([3, 4, 5], params(biased))])[0]
    assert own.token_ids == bias.token_ids and 7 in own.token_ids
    for one, other in zip(own.logprobs, bias.logprobs, strict=True):
        assert all(one[t].logprob == pytest.approx(other[t].logprob, abs=1e-4) for t in other)


def test_processors_see_the_output_and_follow_one_another(engine):
    seen = []

    def spy(output_token_ids, logits):
        assert logits.dtype == np.float32 and logits.shape == (VOCAB,)
        seen.append(output_token_ids)
        return logits

    outputs = run(engine, [*NEIGHBOURS, Request([3, 4], params(spy, parity, biased))], check_every_step=True)
    tokens = outputs[-1].token_ids
    assert seen[-16:] == [tokens[:n] for n in range(16)]  # some twice, where it was preempted before the token came
    assert [token % 2 for token in tokens] == [1, 0] * 8
    assert 7 in tokens


def fail(output_token_ids, logits):
    if len(output_token_ids) == 3:
        raise KeyError("no such thing\nand more")
    return logits


def not_a_number(output_token_ids, logits):
    logits[11] = np.nan
    return logits


FAILURES = [
    (fail, 3, "logits_processors[0] raised KeyError: 'no such thing\\nand more'"),
    (not_a_number, 0, "logits_processors[0] returned nan for token 11; logits must be under infinity"),
    (lambda ids, row: row + np.inf, 0, "logits_processors[0] returned inf for token 0; logits must be under infinity"),
    (
        lambda ids, row: row[:-1],
        0,
        f"logits_processors[0] returned an array of shape ({VOCAB - 1},); it must be ({VOCAB},)",
    ),
    (lambda ids, row: None, 0, "logits_processors[0] returned an array of shape (); it must be (258,)"),
    (lambda ids, row: "text", 0, "logits_processors[0] returned str, which is no array of numbers"),
    (lambda ids, row: [10**400], 0, "logits_processors[0] returned list, which is no array of numbers"),
    (lambda ids, row: row - np.inf, 0, "no token is left to sample"),
]


def test_a_processor_that_fails_ends_its_own_request_alone(engine):
    expected = run(engine, NEIGHBOURS)
    bad = [Request([3, 4], params(processor)) for processor, *_ in FAILURES]
    outputs = run(engine, [bad[0], NEIGHBOURS[0], *bad[1:4], *NEIGHBOURS[1:], *bad[4:]], check_every_step=True)
    neighbours = [outputs.pop(at) for at in (6, 5, 1)][::-1]
    assert_same(expected, neighbours)
    for output, (_, num_tokens, says) in zip(outputs, FAILURES, strict=True):
        assert output.finish_reason == "error" and output.error.startswith(says), output.error
        assert "\n" not in output.error and len(output.token_ids) == num_tokens


def test_blocks_of_a_failed_request_are_free_at_once(engine):
    engine.add_request("bad", [3, 4], params(not_a_number))
    deltas = []
    while not deltas:
        deltas = engine.step()
    assert deltas[0].finish_reason == "error" and engine.kv.pool.num_used == 0 and not engine.requests


def test_an_abort_while_its_step_is_in_flight_leaves_nothing(engine):
    for num_steps in range(1, 6):
        engine.add_request("gone", [3, 4], params(biased))
        for _ in range(num_steps):
            engine.step()
        engine.abort("gone")
        while engine.has_work:
            engine.step()
        assert engine.kv.pool.num_used == 0


def test_a_failure_while_a_token_is_chosen_recomputes_everybody(engine, monkeypatch):
    requests = [*NEIGHBOURS, Request([3, 4], params(biased))]
    expected = run(engine, requests)
    choose, count = engine.runner.choose_token, iter(range(10**6))

    def broken(*args):
        if next(count) == 4:
            raise RuntimeError("out of luck")
        return choose(*args)

    monkeypatch.setattr(engine.runner, "choose_token", broken)
    assert_same(expected, run(engine, requests, check_every_step=True))


def test_several_decodes_in_a_row_wait_for_processors(model, programs_dir, engine):
    requests = [*NEIGHBOURS, Request([3, 4], params(parity))]
    long = make_engine(model, programs_dir, num_scheduler_steps=5, max_num_batched_tokens=8, max_logprobs=VOCAB)
    plain = [Request(r.prompt, dataclasses.replace(r.params, logprobs=None)) for r in requests]
    assert_same(run(engine, requests), run(long, plain))
    long.close()
