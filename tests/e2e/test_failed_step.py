"""A step that fails on the device: nobody is lost but the one that breaks it."""

import pytest
from engines import Request, make_engine, run
from tiny_model import make_tiny_model

from jpaged.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, programs_dir):
    engine = make_engine(str(make_tiny_model(tmp_path_factory.mktemp("tiny"))), programs_dir)
    yield engine
    engine.close()


def break_steps(engine, monkeypatch, breaks):
    """Makes a step fail after it has consumed the pool, wherever breaks(step number, batch) says so."""
    run_step, count = engine.runner.run, iter(range(10**6))

    def broken(batch, sampling, num_sampled):
        number = next(count)
        result = run_step(batch, sampling, num_sampled)
        if breaks(number, batch):
            engine.runner.pool.arrays[0].delete()
            raise RuntimeError("out of luck")
        return result

    monkeypatch.setattr(engine.runner, "run", broken)


def test_a_step_that_fails_once_changes_no_answer(engine, monkeypatch):
    requests = [Request([7, 8, 9] * n, GREEDY) for n in (1, 7, 13)]
    expected = run(engine, requests)
    break_steps(engine, monkeypatch, lambda number, batch: number in (0, 5))
    assert [o.token_ids for o in run(engine, requests, check_every_step=True)] == [o.token_ids for o in expected]


def test_a_request_that_breaks_every_step_fails_alone(engine, monkeypatch):
    good, poison = Request([7, 8, 9], GREEDY), 255
    expected = run(engine, [good])[0].token_ids
    break_steps(engine, monkeypatch, lambda number, batch: poison in batch.token_ids)
    engine.add_request("good", good.prompt, good.params)
    engine.add_request("bad", [poison] * 5, GREEDY)
    tokens, errors = {"good": [], "bad": []}, {}
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            if delta.error is not None:
                errors[delta.request_id] = delta.error
        engine.kv.check_invariants(engine.scheduler.sequences)
    assert tokens == {"good": expected, "bad": []}
    assert list(errors) == ["bad"] and "out of luck" in errors["bad"]
    assert engine.kv.pool.num_used == 0
