"""A step that fails on the device: nobody is lost but the one that breaks it."""

import time

import pytest
from engines import Request, break_steps, make_engine, run
from tiny_model import make_tiny_model

from jpaged.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def engine(request, tmp_path_factory, programs_dir):
    model = str(make_tiny_model(tmp_path_factory.mktemp("tiny")))
    engine = make_engine(model, programs_dir, async_scheduling=request.param)
    yield engine
    engine.close()


@pytest.mark.parametrize("when_read", [False, True])
def test_a_step_that_fails_once_changes_no_answer(engine, monkeypatch, when_read):
    requests = [Request([7, 8, 9] * n, GREEDY) for n in (1, 7, 13)]
    expected = run(engine, requests)
    break_steps(engine, monkeypatch, lambda number, step: number in (0, 5), when_read=when_read)
    assert [o.token_ids for o in run(engine, requests, check_every_step=True)] == [o.token_ids for o in expected]


@pytest.mark.parametrize("when_read", [False, True])
def test_a_request_that_breaks_every_step_fails_alone(engine, monkeypatch, when_read):
    good, poison = Request([7, 8, 9], GREEDY), 255
    expected = run(engine, [good])[0].token_ids
    break_steps(engine, monkeypatch, lambda number, step: poison in step.buffer, when_read=when_read)
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


def test_whoever_fails_is_no_longer_counted_as_waiting(engine, monkeypatch):
    """Though no step says so: all have failed."""
    break_steps(engine, monkeypatch, lambda number, step: True)
    for number in range(3):
        engine.add_request(str(number), [7, 8, 9], GREEDY)
    while engine.has_work:
        engine.step()
    levels = engine.metrics.levels
    assert (levels.num_running, levels.num_waiting, levels.num_physical_blocks) == (0, 0, 0)


@pytest.mark.parametrize("ending", ["stop string", "abort"])
def test_time_without_requests_is_no_gap_between_steps(engine, ending):
    engine.add_request("first", [7, 8, 9], GREEDY)
    for _ in range(4):
        engine.step()
    engine.stop("first", 0) if ending == "stop string" else engine.abort("first")
    while engine.has_work:
        engine.step()
    before = engine.metrics.host_gap.total
    time.sleep(0.3)
    engine.add_request("second", [7, 8, 9], SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    assert engine.metrics.host_gap.total == before
