"""The ladder is chosen by measurement: the measure itself, and that the default holds its bar."""

import itertools
import random
from collections import Counter

import pytest
from choose_buckets import (
    ALL_AT_ONCE,
    BAR,
    StepTime,
    arrivals,
    best_ladder,
    geometric_ladder,
    padding,
    replay,
    row_padding,
)

from jpaged.bench.traces import SHAREGPT_LIKE, read_lengths
from jpaged.buckets import Buckets
from jpaged.config import EngineConfig


def test_padding_by_hand():
    steps = Counter({(3, 1): 2, (4, 4): 1, (5, 1): 1})
    assert padding(steps, [4, 8]) == pytest.approx(1 - 15 / 20)
    assert padding(steps, [3, 4, 5]) == 0
    assert row_padding(steps, Buckets(8, 8, (4, 8))) == pytest.approx(1 - 7 / 20)


def test_one_request_alone_is_its_prompt_and_then_one_token_a_step():
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=8)
    steps = replay([(10, 4)], ALL_AT_ONCE, config, 64, StepTime())
    assert steps == {(8, 0): 1, (2, 1): 1, (1, 1): 3}


def test_requests_far_apart_never_meet_and_all_at_once_they_do():
    trace = [(4, 5)] * 6
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)
    assert set(replay(trace, 1e-3, config, 1024, StepTime())) == {(4, 1), (1, 1)}
    assert set(replay(trace, ALL_AT_ONCE, config, 1024, StepTime())) == {(24, 6), (6, 6)}


def test_arrivals_have_the_rate_and_come_in_order():
    times = arrivals(4000, 5.0)
    assert times == sorted(times) and times[-1] == pytest.approx(800, rel=0.1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_sizes", [1, 2, 3, 20])
def test_the_best_ladder_is_the_best_of_all(seed, num_sizes):
    rng = random.Random(seed)
    steps = Counter({(rng.randint(2, 30), 1): rng.randint(1, 9) for _ in range(7)})
    sizes = {tokens for tokens, _ in steps}
    found = best_ladder(steps, 32, num_sizes)
    options = (
        [*chosen, 32]
        for count in range(min(num_sizes, len(sizes) + 1))
        for chosen in itertools.combinations(sorted(sizes), count)
    )
    assert len(found) <= num_sizes and found[-1] == 32
    assert padding(steps, found) == pytest.approx(min(padding(steps, option) for option in options))


@pytest.mark.parametrize("ratio", [1.25, 1.5, 2])
def test_a_geometric_ladder_climbs_by_its_ratio_to_the_largest(ratio):
    ladder = geometric_ladder(512, ratio)
    assert (ladder[0], ladder[-1]) == (2, 512) and all(a < b <= max(a + 1, a * ratio) for a, b in zip(ladder, ladder[1:]))


@pytest.mark.parametrize("rate", [ALL_AT_ONCE, 1, 2])
def test_the_default_ladder_pads_less_than_the_bar_on_the_trace(rate):
    config = EngineConfig()
    steps = replay(read_lengths(SHAREGPT_LIKE)[:200], rate, config, 46_000, StepTime())
    assert padding(steps, Buckets(config.max_num_batched_tokens, config.max_num_seqs).tokens) < BAR
