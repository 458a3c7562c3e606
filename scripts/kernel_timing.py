"""Time of device work that may be shorter than a dispatch, and this machine's own bandwidth and matmul rate.

A call is one jitted program that launches the work many times, and gives its result to the next call, which is donated
it: calls can neither overlap nor be dropped, and the host queues them ahead of the device. Only the last of a round is
waited for. So what is left of host time a launch is (a wait / calls + the excess of a dispatch over a call) / launches.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

ROUND_SECONDS = 0.05  # the wait at the end of a round is tens of microseconds
MAX_CALLS = 200
ROUNDS = 5
SLOW_SECONDS = 0.5  # a call that takes so long is timed twice and no more


@dataclass(frozen=True)
class Yardsticks:
    """What this machine does on its own simplest program, in this process. Several times each, the first to the last."""

    copies: list[float]  # bytes a second, read and written
    matmuls: list[float]  # FLOP a second
    dispatch: float  # seconds of an empty program, called one after the other

    @property
    def bandwidth(self) -> float:
        return statistics.median(self.copies)

    @property
    def matmul_rate(self) -> float:
        return statistics.median(self.matmuls)


def repeat(body: Callable, times: int, state):
    """`body(index, state)` again and again inside a jit. The count is static: a GPU then need not ask the host whether
    to go on. One time is no loop: the kernels' interpreters see the plain program."""
    return body(0, state) if times == 1 else jax.lax.fori_loop(0, times, body, state)


def rounds_of(call: Callable, state, variants: list[tuple], once: bool = False) -> tuple[list[list[float]], object]:
    """Seconds of `state = call(state, *variant)` for each variant, by rounds that take turns; and the last state.

    Taking turns makes the variants' ratio independent of the chip's changing clock. `once` calls each a single time,
    and that time includes compilation: to see that it runs.
    """
    least = []
    for variant in variants:
        if not once:
            state = jax.block_until_ready(call(state, *variant))  # compiles
        start = time.perf_counter()
        state = jax.block_until_ready(call(state, *variant))
        least.append(time.perf_counter() - start)
    if once:
        return [[seconds] for seconds in least], state
    calls = max(1, min(MAX_CALLS, math.ceil(ROUND_SECONDS / max(least))))
    times = [[] for _ in variants]
    for _ in range(2 if max(least) > SLOW_SECONDS else ROUNDS):
        for variant, taken in zip(variants, times):
            start = time.perf_counter()
            for _ in range(calls):
                state = call(state, *variant)
            jax.block_until_ready(state)
            taken.append((time.perf_counter() - start) / calls)
    return times, state


def measure_yardsticks(tiny: bool) -> Yardsticks:
    on_cpu = jax.default_backend() == "cpu"
    num_bytes = 2**16 if tiny else 2**27 if on_cpu else 2**30
    size = 64 if tiny else 1024 if on_cpu else 8192
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    return Yardsticks(_copies(num_bytes, tiny), _matmuls(size, dtype, tiny), _dispatch(tiny))


def _copies(num_bytes: int, once: bool) -> list[float]:
    times = 4

    @functools.partial(jax.jit, donate_argnums=0)
    def copy(x):
        return repeat(lambda index, x: x ^ index, times, x)

    x = jax.random.bits(jax.random.key(0, impl="rbg"), (num_bytes // 4,), jnp.uint32).astype(jnp.int32)
    (seconds,), _ = rounds_of(copy, x, [()], once)
    return [2 * num_bytes * times / taken for taken in seconds]


def _matmuls(size: int, dtype, once: bool) -> list[float]:
    times = 4

    @functools.partial(jax.jit, donate_argnums=0)
    def multiply(x, weights):
        return repeat(lambda _, x: x @ weights, times, x)

    # Random, because a product of zeros takes less power and so runs faster; neither growing nor vanishing.
    x, weights = jax.random.normal(jax.random.key(0, impl="rbg"), (2, size, size))
    variants = [((weights / math.sqrt(size)).astype(dtype),)]
    (seconds,), _ = rounds_of(multiply, x.astype(dtype), variants, once)
    return [2 * size**3 * times / taken for taken in seconds]


def _dispatch(once: bool) -> float:
    (seconds,), _ = rounds_of(jax.jit(lambda x: x + 1, donate_argnums=0), jnp.zeros(8), [()], once)
    return statistics.median(seconds)
