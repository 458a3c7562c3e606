"""Each gate on a compiled step can fail: steps made worse on purpose, and what the gates say of them."""

import dataclasses
import json

import jax
import pytest
from cases import CONFIG, DECODE, Case
from evidence import Evidence
from figures import Figures

from jpaged.step import StepFunction

pytestmark = pytest.mark.compile

CASES = [Case("8b", "v6e", 4, 1), Case("8b", "h200", 8, 1)]
GOOD = Evidence(
    state=10 << 30, beside_pools=0, alias=10 << 30, temp=1 << 20, needed=12 << 30, pool_copies=0, all_reduces=3, all_reduces_due=3,
    kernels=4, kernels_due=4, cycles=1000, seconds=1.0,
)  # fmt: skip
HBM = 16 << 30


def undonated(jitted):
    return jax.jit(jitted.__wrapped__)


def with_moved_pools(jitted):
    """As if somebody had written pool[::-1] in the step: it cannot be done in place."""

    def step(leaves, state, buffer):
        return jitted.__wrapped__(
            leaves, dataclasses.replace(state, pools=jax.tree.map(lambda x: x[::-1], state.pools)), buffer
        )

    return jax.jit(step, donate_argnums=1)


def kinds(problems: list[str]) -> set[str]:
    return {problem.split(":")[0] for problem in problems}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_without_donation_fails_the_gate_on_alias(case):
    """Not that on memory: one layer's pools fit twice. Its own number is looked at below."""
    evidence = case.evidence(DECODE, change=undonated)
    assert evidence.alias == 0
    assert "alias" in kinds(case.problems(evidence))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_that_moves_its_pools_fails_a_gate_though_it_donates_them(case):
    good, evidence = case.evidence(DECODE), case.evidence(DECODE, change=with_moved_pools)
    assert case.problems(good) == []
    assert evidence.pool_copies or evidence.temp > good.temp + good.state // 2
    assert {"copies", "temp"} & kinds(case.problems(evidence))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_without_the_kernels_fails_the_gate_on_them(case):
    config = dataclasses.replace(CONFIG, attention_backend="xla")
    step = StepFunction(config, case.step.model, case.step.mesh)
    evidence = Evidence.of(step, DECODE, num_blocks=64, max_blocks=8)
    assert evidence.kernels < evidence.kernels_due
    assert "kernels" in kinds(case.problems(evidence))


def test_each_gate_sees_its_own_number_and_a_good_step_passes():
    assert GOOD.problems(HBM) == []
    for change, kind in (
        ({"alias": 9 << 30}, "alias"), ({"temp": 1 << 30}, "temp"), ({"pool_copies": 1}, "copies"),
        ({"needed": 17 << 30}, "memory"), ({"all_reduces": 4}, "all-reduces"), ({"kernels": 2}, "kernels"),
    ):  # fmt: skip
        assert kinds(dataclasses.replace(GOOD, **change).problems(HBM)) == {kind}
    assert kinds(GOOD.problems(HBM, left_out=5 << 30)) == {"memory"}


def test_figure_that_has_moved_or_is_unknown_or_of_another_compiler_is_told(tmp_path):
    path = tmp_path / "figures.json"
    Figures(path, update=True).check("a", 1000)
    kept = Figures(path)
    assert kept.check("a", 1019) is None and kept.check("a", 981) is None
    assert "+3.0% against 1000" in kept.check("a", 1030) and "-3.0%" in kept.check("a", 970)
    assert "no figure of b" in kept.check("b", 1)
    path.write_text(json.dumps({"libtpu": "0", "cycles": {"a": 1000}}))
    assert "no figure of a" in Figures(path).check("a", 1000)
