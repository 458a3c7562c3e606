"""When requests are sent."""

import math

import numpy as np
import pytest

from jpaged.bench.arrivals import draw_arrivals, replay


def gaps(rate: float, burstiness: float) -> np.ndarray:
    return np.diff(draw_arrivals(20_001, rate, burstiness, np.random.default_rng(0)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness):
    measured = gaps(5.0, burstiness)
    assert measured.mean() == pytest.approx(1 / 5)
    assert measured.std() / measured.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_burstiness_one_is_a_poisson_process():
    measured = gaps(5.0, 1.0)
    for seconds in (0.1, 0.2, 0.4):  # exponential gaps
        assert (measured > seconds).mean() == pytest.approx(math.exp(-5 * seconds), abs=0.01)


def test_a_faster_rate_sends_the_same_pattern_faster():
    slow, fast = (draw_arrivals(50, rate, 1.0, np.random.default_rng(3)) for rate in (1.0, 4.0))
    assert slow == pytest.approx([4 * arrival for arrival in fast])


def test_an_infinite_rate_sends_all_at_once_and_one_request_goes_at_once():
    rng = np.random.default_rng(0)
    assert draw_arrivals(3, math.inf, 1.0, rng) == [0.0, 0.0, 0.0]
    assert draw_arrivals(1, 2.0, 1.0, rng) == [0.0]


def test_a_replay_starts_with_the_first_request_and_scales_the_gaps():
    assert replay([12.0, 10.0, 11.0], 0.5) == [1.0, 0.0, 0.5]
