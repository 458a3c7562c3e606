"""Preemption: the way back that is estimated to be cheaper, in words that say why."""

import pytest

from jpaged.config import EngineConfig
from jpaged.preemption import Preemption
from jpaged.swap_space import CHUNK


def costs(mode="auto", platform="gpu", bytes_per_block=2 << 20, num_weights=8e9):
    config = EngineConfig(preemption_mode=mode)
    return Preemption.of(config, platform=platform, bytes_per_block=bytes_per_block, num_weights=num_weights)


def test_few_bytes_are_moved_and_few_tokens_of_a_small_model_recomputed():
    assert costs().prefers_swap(num_blocks=32, num_tokens=500)
    assert not costs(num_weights=1e6).prefers_swap(num_blocks=32, num_tokens=500)
    assert not costs().prefers_swap(num_blocks=1, num_tokens=1)  # to start a copy costs, too


def test_the_estimate_is_bytes_out_and_in_against_operations():
    swap, recompute = costs().costs(num_blocks=2 * CHUNK, num_tokens=160)
    assert swap == pytest.approx(2 * (2 * CHUNK * (2 << 20) / 25e9 + 2 * 2e-4))
    assert recompute == pytest.approx(160 * 2 * 8e9 / 3e14)


@pytest.mark.parametrize("size", [(1, 1), (32, 500)])
def test_a_mode_that_was_asked_for_is_kept_whatever_it_costs(size):
    assert costs("swap").prefers_swap(*size) and not costs("recompute").prefers_swap(*size)


def test_the_reason_is_told():
    auto = costs()
    assert (
        auto.explain(True, 32, 500)
        == "is swapped out (moving 32 blocks out and in: 6.97 ms, computing 500 tokens: 26.7 ms)"
    )
    assert auto.explain(False, 32, 500).endswith("26.7 ms; swap_space is full)")
    assert "full" not in auto.explain(False, 1, 1)
    assert costs("swap").explain(True, 32, 500) == "is swapped out"
    assert costs("recompute").explain(False, 32, 500) == "will be recomputed"
