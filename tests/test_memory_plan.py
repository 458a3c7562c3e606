"""plan_memory: the pool takes what is really left, and the table adds up."""

from types import SimpleNamespace

import jax
import pytest

from jpaged.config import EngineConfig
from jpaged.memory_plan import CPU_POOL_BYTES, StepMemory, device_limit, plan_memory

GIB = 1 << 30
STEP = StepMemory(temp=GIB // 2, output=GIB // 4, code=GIB // 64)


def accelerator(limit=16 * GIB, stats="given"):
    """Of a jax.Device only what the plan asks for: there is no accelerator where the tests run."""
    return SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": limit} if stats == "given" else stats)


def plan(*, device=None, step=None, weights=8 * GIB, rows=0, max_position=2048, **options):
    return plan_memory(
        EngineConfig(**options),
        max_position=max_position,
        block_size=16,
        bytes_per_block=1 << 20,
        cache_dtype="bfloat16",
        weights=weights,
        rows=rows,
        device=device or jax.devices("cpu")[0],
        step=step,
        num_programs=16,
    )


def test_pool_on_cpu_is_the_stated_default_whatever_the_weights():
    for weights in (0, 100 * GIB):
        got = plan(weights=weights)
        assert (got.pool, got.spec.num_blocks, got.limit) == (CPU_POOL_BYTES, 1024, None)


def test_pool_on_an_accelerator_is_what_weights_running_sequences_and_the_largest_step_leave():
    got = plan(device=accelerator(), step=STEP, rows=GIB // 8, device_memory_utilization=0.75)
    left = 12 * GIB - 8 * GIB - GIB // 8 - GIB // 2 - GIB // 4 - 16 * (GIB // 64)
    assert got.spec.num_blocks == left // (1 << 20) == 2944
    assert got.pool + got.weights + STEP.temp + STEP.output + 16 * STEP.code <= 0.75 * got.limit


def test_pool_never_takes_more_than_it_was_given():
    got = plan(kv_cache_memory_bytes=(10 << 20) - 1)
    assert (got.spec.num_blocks, got.pool) == (9, 9 << 20)


@pytest.mark.parametrize("device, step", [(None, None), (accelerator(), None)])
def test_given_sizes_come_before_what_is_free(device, step):
    assert plan(device=device, step=step, kv_cache_memory_bytes=64 << 20).spec.num_blocks == 64
    assert plan(device=device, step=step, kv_cache_memory_bytes=64 << 20, num_blocks_override=7).spec.num_blocks == 7


def test_context_is_cut_to_a_small_pool():
    spec = plan(num_blocks_override=11).spec
    assert (spec.max_model_len, spec.num_usable_tokens, spec.block_size) == (160, 160, 16)
    assert plan(num_blocks_override=1001).spec.max_model_len == 2048


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"kv_cache_memory_bytes": 2_000_000},
            ["2000000 bytes", "kv_cache_memory_bytes", "1 blocks of 1048576", "at least 2"],
        ),
        ({"device": accelerator(8 * GIB), "step": STEP}, ["0 bytes", "what is free of 92%", "0 blocks", "at least 2"]),
        ({"num_blocks_override": 5, "max_model_len": 65}, ["max_model_len (65)", "64 tokens"]),
    ],
)
def test_pool_that_cannot_hold_anything_is_refused_with_the_numbers(options, words):
    with pytest.raises(ValueError) as error:
        plan(**options)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}])
def test_device_that_does_not_tell_its_memory_names_what_to_give_instead(stats):
    with pytest.raises(NotImplementedError, match="kv_cache_memory_bytes or num_blocks_override"):
        device_limit(accelerator(stats=stats))


def test_table_says_where_the_memory_goes_and_what_fits():
    table = plan(device=accelerator(), step=STEP, device_memory_utilization=0.75).table()
    for words in (
        "weights                8,192.0 MiB",
        "step's temporaries       768.0 MiB",
        "programs                 256.0 MiB  16 programs",
        "KV pool                3,072.0 MiB  3072 blocks of 16 tokens, bfloat16 (what is free of 75%)",
        "limit                 16,384.0 MiB",
        "49,136 tokens fit: 24.0 requests of the maximum length, 2,048 tokens",
    ):
        assert words in table
    assert "limit" not in plan().table()
