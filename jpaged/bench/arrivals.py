"""Arrivals: when each request is sent, in seconds from the start, whatever becomes of the ones before it."""

import math
from collections.abc import Sequence

import numpy as np


def draw_arrivals(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """rate requests a second, the first at 0; all at 0 for an infinite rate.

    The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more
    even. As in vLLM the gaps are then scaled, so that a short run has the mean rate that was asked for as well.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=num_requests - 1)
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    if times[-1] > 0:
        times *= (num_requests - 1) / rate / times[-1]
    return times.tolist()


def replay(timestamps: Sequence[float], time_scale: float) -> list[float]:
    """The arrivals of a trace from its first one on, every gap times time_scale."""
    first = min(timestamps)
    return [(timestamp - first) * time_scale for timestamp in timestamps]
