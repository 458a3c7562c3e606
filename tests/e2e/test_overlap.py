"""While a step runs the next one is planned: who must wait for its result, who goes on, and what each step costs the host."""

import jax
import numpy as np
import pytest
from engines import make_engine

from jpaged.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    engine = make_engine(model, programs_dir)
    assert engine.config.async_scheduling
    yield engine
    engine.close()


def add(engine, name: str, prompt: list[int], **params) -> None:
    engine.add_request(name, prompt, SamplingParams(temperature=0, ignore_eos=True, **params))


NEEDS_THE_HOST = {"beams": {"n": 3, "use_beam_search": True}, "processors": {"logits_processors": [lambda ids, row: row]}}


@pytest.mark.parametrize("kind", NEEDS_THE_HOST)
def test_who_needs_to_see_a_token_sits_out_the_step_in_flight_and_the_others_go_on(engine, monkeypatch, kind):
    """Drafts: tests/test_speculation.py."""
    planned, schedule = [], engine.scheduler.schedule

    def watched():
        in_flight = {seq.request_id for plan in engine.scheduler.in_flight for seq in plan.sampled}
        plan = schedule()
        if plan is not None and plan.num_tokens:
            planned.append((in_flight, {seq.request_id for seq in plan.num_scheduled_tokens}))
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    add(engine, "plain", [5, 6, 7], max_tokens=40)
    add(engine, "needs", [8, 9], max_tokens=10, **NEEDS_THE_HOST[kind])
    while "needs" in engine.requests:
        assert "plain" in engine.requests
        engine.step()
    assert all("needs" not in plan for in_flight, plan in planned if "needs" in in_flight)
    assert all("plain" in plan for _, plan in planned)
    sat_out = [plan for in_flight, plan in planned if "needs" in in_flight]
    computed = [plan for _, plan in planned if "needs" in plan]
    assert len(sat_out) >= 9 and len(computed) == 10
    while engine.has_work:
        engine.step()
    assert engine.kv.pool.num_used == 0


def test_a_step_in_which_nobody_comes_or_goes_is_one_call_with_one_upload(engine, monkeypatch):
    """Everything else that the program takes is on the device, and nothing else runs there."""
    for number in range(5):
        add(engine, str(number), [5 + number] * (3 + number), max_tokens=40)
    for _ in range(4):
        engine.step()
    programs, calls = engine.runner.programs, []

    class Watched:
        def __getitem__(self, key):
            def call(leaves, state, buffer):
                assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((leaves, state)))
                assert isinstance(buffer, np.ndarray) and buffer.dtype == np.int32 and buffer.ndim == 1
                calls.append(key)
                with jax.transfer_guard("allow"):
                    return programs[key](leaves, state, buffer)

            return call

    monkeypatch.setattr(engine.runner, "programs", Watched())
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        with pytest.raises(Exception, match="[Dd]isallowed"):
            jax.numpy.ones(3) + np.ones(3)  # so the guard is one
        for number in range(20):
            engine.step()
            assert len(calls) == number + 1
    monkeypatch.undo()
    while engine.has_work:
        engine.step()
    assert engine.kv.pool.num_used == 0
