"""`check_kernels`: a wrong kernel or block id stops the engine with one line that says what and where."""

import numpy as np
import pytest
from engines import Request, make_engine, run
from tiny_model import make_tiny_model

from jpaged.errors import KernelCheckFailed
from jpaged.sampling_params import SamplingParams
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.xla import ragged_paged_attention_xla

pytestmark = pytest.mark.long  # a debug mode, with programs of its own

REQUESTS = [Request([7, 8, 9] * n, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)) for n in (1, 13)]


@pytest.fixture
def engine(tmp_path, request):
    """With programs of its own: those of a wrong kernel must not be found by other tests."""
    engine = make_engine(
        str(make_tiny_model(tmp_path)), str(tmp_path / "programs"), check_kernels=True, **getattr(request, "param", {})
    )
    yield engine
    engine.close()


def use(monkeypatch, implementation) -> None:
    monkeypatch.setitem(api._IMPLEMENTATIONS, "kernel", implementation)
    monkeypatch.setitem(api._DEFAULT, "cpu", ("kernel",))


def stops(engine) -> str:
    with pytest.raises(KernelCheckFailed) as error:
        run(engine, REQUESTS)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "engine", [{}, pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.slow)], indirect=True, ids=str
)
def test_kernels_that_are_right_are_checked_and_nothing_changes(engine, monkeypatch):
    seen = []

    def nearly(*args, **kwargs):
        seen.append(args[0].shape)
        return ragged_paged_attention_xla(*args, **kwargs) * 1.001

    use(monkeypatch, nearly)
    outputs = run(engine, REQUESTS)
    assert all(len(output.token_ids) == 6 for output in outputs)
    assert engine.runner._check.num_steps > 1 and len(seen) > 2  # in the steps, and beside them


def test_wrong_kernel_stops_the_engine_and_names_the_step_and_the_layer(engine, monkeypatch):
    use(monkeypatch, lambda *args, **kwargs: ragged_paged_attention_xla(*args, **kwargs) * 1.1)
    assert stops(engine).startswith("step 1, layer 1: the kernel's attention is 0.1 of the largest output away")


def test_nan_is_wrong(engine, monkeypatch):
    use(monkeypatch, lambda *args, **kwargs: ragged_paged_attention_xla(*args, **kwargs) * np.nan)
    assert "attention is inf" in stops(engine)


def test_block_id_past_the_pool_is_named(engine, monkeypatch):
    build = engine.batch_builder.build

    def broken(plan):
        step = build(plan)
        engine.runner.step.packing(step.bucket).views(step.buffer).table_updates[0, 2] = 128
        return step

    monkeypatch.setattr(engine.batch_builder, "build", broken)
    assert stops(engine) == "step 1: the host sends block 128; the pool has blocks 0 to 127"
