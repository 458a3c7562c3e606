"""The engine's whole step, compiled for chips that are not here: it fits, in place, uncopied, as fast as before."""

import pytest
from cases import CONFIG, DECODE, MIXED, Case
from figures import Figures

from jpaged.memory_plan import StepMemory, plan_memory

pytestmark = pytest.mark.compile

# A step's weights, pools and time follow its layers linearly, so most cases have two, and the larger size; each family
# has one model of full depth, in both. Eight KV heads: of a slice of 16 devices a model uses 8.
WHOLE = [Case("8b", "v6e", 4), Case("8b", "h200", 8)]
TWO_LAYERS = [
    Case("135m", "v5e", 1, 2),
    Case("135m", "v6e", 1, 2),
    Case("135m", "tpu7x", 1, 2),
    Case("135m", "h200", 1, 2),
    Case("8b", "v4", 4, 2),
    Case("8b", "v5e", 8, 2),
    Case("70b", "v5p", 8, 2),
    Case("70b", "v6e", 8, 2),
    Case("70b", "tpu7x", 8, 2),
    Case("70b", "h200", 8, 2),
    Case("8b", "v6e", 4, 2, "int8"),
    Case("8b", "h200", 1, 2, "int8"),
    Case("8b", "v6e", 1, 2, "fp8"),
    Case("8b", "h200", 1, 2, "fp8"),
]
LIKE_OTHERS = [Case("135m", "v4", 1, 2), Case("135m", "v5p", 1, 2), Case("8b", "h200", 1, 2)]  # not in CI, for its time
STEPS = [(case, bucket) for case in WHOLE for bucket in (DECODE, MIXED)] + [(case, MIXED) for case in TWO_LAYERS]
STEPS += [pytest.param(case, MIXED, marks=pytest.mark.slow) for case in LIKE_OTHERS]
DOES_NOT_FIT = [
    Case("8b", "v5e", 1),
    Case("70b", "v4", 4),
    Case("70b", "v5e", 8),
    Case("70b", "v6e", 4),
    Case("70b", "h200", 1),
]


@pytest.fixture(scope="session")
def figures(request) -> Figures:
    return Figures(update=request.config.getoption("--update-figures"))


@pytest.mark.parametrize("case, bucket", STEPS, ids=str)
def test_step_fits_its_chip_and_updates_its_pools_in_place(case, bucket, figures):
    evidence = case.evidence(bucket)
    print(case, bucket, evidence)  # `-rP` shows it
    assert case.problems(evidence) == []
    if case.on.platform == "tpu":
        assert evidence.cycles and not (wrong := figures.check(f"{case}-{bucket[0]}", evidence.cycles)), wrong


@pytest.mark.parametrize("case", DOES_NOT_FIT, ids=str)
def test_model_over_its_chips_memory_is_refused_with_the_bytes(case):
    step = case.step
    with pytest.raises(ValueError, match=r"\d+ bytes for the KV pool \(what is free of 92%\) hold \d blocks"):
        plan_memory(
            CONFIG, max_position=step.model.max_position, block_size=step.layout.block_size,
            bytes_per_block=step.bytes_per_block, cache_dtype=step.layout.dtype, weights=step.weight_bytes, rows=0,
            device=case.on.device,
            step=StepMemory(0, 0, 0), num_programs=2,
        )  # fmt: skip


@pytest.mark.parametrize("case", [Case("8b", "v6e", 4, 2), Case("8b", "h200", 8, 2)], ids=str)
def test_plan_holds_with_the_pools_that_it_gives(case):
    plan = case.plan()
    evidence = case.evidence(MIXED, plan.spec.num_blocks)
    assert evidence.problems(case.on.hbm) == []
    assert evidence.temp <= 1.01 * plan.step.temp  # or a part of a pool is copied
    assert plan.weights + plan.pool + plan.step.temp <= CONFIG.device_memory_utilization * case.on.hbm
