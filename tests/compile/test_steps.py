"""The engine's whole step, compiled for chips that are not here: what fits, in place, without copies, as fast as before."""

import pytest
from cases import CONFIG, DECODE, MIXED, Case
from evidence import Evidence
from figures import Figures

from jpaged.memory_plan import StepMemory, plan_memory

pytestmark = pytest.mark.compile

# Memory and time of a step follow its layers linearly, so most cases have few; each family has one of full depth.
# Eight KV heads: a slice of 16 devices is used by 8 of them.
CASES = [
    Case("135m", "v4", 1, 4),
    Case("135m", "v5e", 1, 4),
    Case("135m", "v5p", 1, 4),
    Case("135m", "v6e", 1),
    Case("135m", "tpu7x", 1, 4),
    Case("135m", "h200", 1, 4),
    Case("8b", "v4", 4, 2),
    Case("8b", "v5e", 8, 2),
    Case("8b", "v6e", 4),
    Case("8b", "h200", 1, 2),
    Case("8b", "h200", 8),
    Case("70b", "v5p", 8, 2),
    Case("70b", "v6e", 8, 2),
    Case("70b", "tpu7x", 8, 2),
    Case("70b", "h200", 8, 2),
]
DOES_NOT_FIT = [
    Case("8b", "v5e", 1),
    Case("70b", "v4", 4),
    Case("70b", "v5e", 8),
    Case("70b", "v6e", 4),
    Case("70b", "h200", 1),
]
IN_BOTH_SIZES = {"8b", "70b"}


@pytest.fixture(scope="session")
def figures(request) -> Figures:
    return Figures(update=request.config.getoption("--update-figures"))


@pytest.mark.parametrize("bucket", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_fits_its_chip_and_updates_its_pools_in_place(case, bucket, figures, record_property):
    evidence = case.evidence(bucket)
    record_property("evidence", str(evidence))
    print(case, bucket, evidence)
    assert case.problems(evidence) == []
    if case.on.platform == "tpu":
        assert evidence.cycles and not (wrong := figures.check(f"{case}-{bucket[0]}", evidence.cycles)), wrong


@pytest.mark.parametrize("case", DOES_NOT_FIT, ids=str)
def test_model_over_its_chips_memory_is_refused_with_the_bytes(case):
    step = case.step
    with pytest.raises(ValueError, match=r"\d+ bytes for the KV pool \(what is free of 92%\) hold \d blocks"):
        plan_memory(
            CONFIG, max_position=step.model.max_position, block_size=step.layout.block_size,
            bytes_per_block=step.bytes_per_block, weights=step.weight_bytes, device=case.on.device,
            step=StepMemory(0, 0, 0), num_programs=2,
        )  # fmt: skip


@pytest.mark.parametrize("case", [Case("8b", "v6e", 4, 2), Case("8b", "h200", 8, 2)], ids=str)
def test_plan_made_with_pools_of_two_blocks_holds_with_the_pools_that_it_gives(case):
    plan = case.plan()
    evidence = case.evidence(MIXED, plan.spec.num_blocks)
    assert evidence.problems(case.on.hbm) == []
    assert evidence.temp <= 1.01 * plan.step.temp  # or a part of a pool is copied
    assert plan.weights + plan.pool + plan.step.temp <= CONFIG.device_memory_utilization * case.on.hbm
