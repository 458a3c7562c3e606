"""Samples and beams in blocks of 64: each sequence comes to its third, and there is not room for all."""

import random

import pytest
from engines import Request, assert_equal, count_swaps, make_engine, run

from jpaged.sampling_params import SamplingParams
from jpaged.swap_space import SwappedGroup

KINDS = {
    "samples": {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    "beams": {"temperature": 0.0, "use_beam_search": True},
}


def requests(kind: str) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            [rng.randrange(3, 250) for _ in range(length)],
            SamplingParams(n=4, max_tokens=100, ignore_eos=True, seed=length, **KINDS[kind]),
        )
        for length in (46, 50, 62)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "swap", "async_scheduling": True, "enable_prefix_caching": True},
        {"preemption_mode": "recompute", "async_scheduling": False, "enable_prefix_caching": False},
        {"preemption_mode": "recompute", "num_scheduler_steps": 5, "enable_prefix_caching": True},
    ],
    ids=str,
)
def test_a_group_gives_in_a_small_pool_what_it_gives_alone(model, programs_dir, engine, kind, options):
    expected = [output for request in requests(kind) for output in run(engine, [request])]
    small = make_engine(
        model, programs_dir, block_size=64, num_blocks_override=13, max_model_len=192, max_num_batched_tokens=16, **options
    )
    swaps = count_swaps(small)
    assert_equal(2 * expected, run(small, 2 * requests(kind), check_every_step=True))
    assert small.scheduler.num_preemptions > 0, "the pool was meant to be too small"
    assert any(isinstance(swapped, SwappedGroup) for swapped in swaps) == (options["preemption_mode"] == "swap")
    small.close()
