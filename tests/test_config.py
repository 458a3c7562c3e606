"""EngineConfig: a configuration that cannot work is refused at start-up, in one line with the numbers."""

import dataclasses
import math

import pytest

from jpaged.cache_spec import CacheSpec, resolve_max_model_len
from jpaged.config import EngineConfig
from jpaged.speculative_config import SpeculativeConfig

REFUSED = [
    ({"block_size": 0}, ["block_size", "at least 1", "got 0"]),
    ({"swap_space": -1}, ["swap_space", "0 or more", "got -1"]),
    ({"swap_space": float("nan")}, ["swap_space", "0 or more", "got nan"]),
    ({"preemption_mode": "drop"}, ["preemption_mode", "auto, recompute, swap", "'drop'"]),
    ({"scheduling_policy": "lottery"}, ["scheduling_policy", "fcfs, priority", "'lottery'"]),
    ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens", "at least 1", "got 0"]),
    ({"max_num_seqs": -1}, ["max_num_seqs", "at least 1", "got -1"]),
    ({"tensor_parallel_size": 0}, ["tensor_parallel_size", "at least 1", "got 0"]),
    ({"max_model_len": 0}, ["max_model_len", "at least 1", "got 0"]),
    ({"kv_cache_memory_bytes": -5}, ["kv_cache_memory_bytes", "at least 1", "got -5"]),
    ({"max_num_queued_requests": 0}, ["max_num_queued_requests", "at least 1", "got 0"]),
    ({"num_blocks_override": 1}, ["num_blocks_override", "at least 2", "got 1"]),
    ({"device_memory_utilization": 0.0}, ["device_memory_utilization", "(0, 1]", "got 0.0"]),
    ({"device_memory_utilization": 1.1}, ["device_memory_utilization", "(0, 1]", "got 1.1"]),
    ({"device_memory_utilization": math.nan}, ["device_memory_utilization", "(0, 1]", "got nan"]),
    ({"max_logprobs": -1}, ["max_logprobs", "at least 0", "got -1"]),
    ({"dtype": "float16"}, ["dtype", "auto, bfloat16, float32", "'float16'"]),
    ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype", "auto, bfloat16, float32, int8, fp8, fp8_e4m3", "'fp8_e5m2'"]),
    ({"generation_config": "vllm"}, ["generation_config", "auto, none", "'vllm'"]),
    ({"attention_backend": "cuda"}, ["attention_backend", "xla, reference", "'cuda'"]),
    (
        {"max_num_batched_tokens": 100, "max_num_seqs": 101},
        ["max_num_batched_tokens (100)", "max_num_seqs (101)"],
    ),
    ({"speculative_config": {"method": "eagle"}}, ["speculative_config", "method", "ngram", "'eagle'"]),
    ({"speculative_config": {"model": "x"}}, ["speculative_config", "'model'", "num_speculative_tokens"]),
    ({"speculative_config": {"num_speculative_tokens": 0}}, ["num_speculative_tokens", "1 to 64", "got 0"]),
    ({"speculative_config": {"num_speculative_tokens": 65}}, ["num_speculative_tokens", "1 to 64", "got 65"]),
    ({"speculative_config": {"num_speculative_tokens": True}}, ["num_speculative_tokens", "integer", "got True"]),
    ({"speculative_config": {"prompt_lookup_min": 0}}, ["prompt_lookup_min", "1 to 32", "got 0"]),
    ({"speculative_config": {"prompt_lookup_max": 33}}, ["prompt_lookup_max", "1 to 32", "got 33"]),
    ({"speculative_config": {"prompt_lookup_max": 1}}, ["prompt_lookup_min (2)", "prompt_lookup_max (1)"]),
    ({"speculative_config": [4]}, ["speculative_config", "JSON object", "[4]"]),
    ({"speculative_config": "{4"}, ["speculative_config", "not JSON"]),
    (
        {"speculative_config": {}, "max_num_seqs": 8, "max_num_batched_tokens": 11},
        ["max_num_batched_tokens (11)", "max_num_seqs (8)", "num_speculative_tokens (4)"],
    ),
    ({"speculative_config": {}, "num_scheduler_steps": 2}, ["num_scheduler_steps (2)", "speculative_config"]),
    ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, ["max_num_batched_tokens (1)", "at least", "2"]),
]


@pytest.mark.parametrize("options, words", REFUSED)
def test_bad_value_is_refused_by_name_with_the_value_and_the_limit(options, words):
    with pytest.raises(ValueError) as error:
        EngineConfig(**options)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 512},
        {"max_num_seqs": 1, "max_num_batched_tokens": 2},
        {"num_blocks_override": 2},
        {"device_memory_utilization": 1.0},
        {"max_logprobs": 0},
        {"block_size": 1},
        {"kv_cache_dtype": "float32", "dtype": "bfloat16", "attention_backend": "reference"},
    ],
)
def test_values_at_the_limits_are_accepted(options):
    config = EngineConfig(**options)
    assert all(getattr(config, name) == value for name, value in options.items())


def test_every_option_has_a_line_of_help():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"] and "\n" not in field.metadata["help"], field.name


def test_configuration_never_changes_after_it_was_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 8
    assert EngineConfig(served_model_name=["a", "b"]).served_model_name == ("a", "b")


def test_speculation_is_off_and_what_is_not_said_of_it_has_a_default():
    assert EngineConfig().speculative_config is None
    ngram = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
    assert EngineConfig(speculative_config={"method": "ngram"}).speculative_config == ngram
    assert EngineConfig(speculative_config='{"prompt_lookup_min": 1}').speculative_config.prompt_lookup_min == 1


def test_spec_counts_the_null_block_out_and_a_part_of_a_block_in():
    spec = CacheSpec(num_blocks=11, block_size=16, max_model_len=100)
    assert (spec.num_usable_blocks, spec.num_usable_tokens, spec.max_blocks_per_seq) == (10, 160, 7)


@pytest.mark.parametrize(
    "wanted, max_position, usable, length",
    [(None, 8192, 100_000, 8192), (None, 8192, 1000, 1000), (500, 8192, 1000, 500), (1000, 1000, 1000, 1000)],
)
def test_context_is_what_was_asked_for_or_what_model_and_pool_allow(wanted, max_position, usable, length):
    assert resolve_max_model_len(EngineConfig(max_model_len=wanted), max_position, usable) == length


@pytest.mark.parametrize(
    "options, max_position, usable, words",
    [
        ({"max_model_len": 2049}, 2048, 9999, ["max_model_len (2049)", "2048"]),
        ({"max_model_len": 2048}, 2048, 2047, ["max_model_len (2048)", "2047", "kv_cache_memory_bytes"]),
        ({"enable_chunked_prefill": False}, 2048, 9999, ["max_num_batched_tokens (512)", "max_model_len (2048)"]),
        ({"enable_chunked_prefill": False, "max_model_len": 513}, 2048, 9999, ["(512)", "(513)"]),
    ],
)
def test_context_that_cannot_be_served_is_refused_with_the_numbers(options, max_position, usable, words):
    with pytest.raises(ValueError) as error:
        resolve_max_model_len(EngineConfig(**options), max_position, usable)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_whole_prompts_that_fit_one_step_need_no_chunks():
    config = EngineConfig(enable_chunked_prefill=False, max_model_len=512)
    assert resolve_max_model_len(config, 2048, 9999) == 512
    assert resolve_max_model_len(EngineConfig(enable_chunked_prefill=False), 2048, 512) == 512


@pytest.mark.parametrize(
    "asked, platform, size", [(None, "cpu", 64), (None, "gpu", 16), (None, "tpu", 16), (32, "cpu", 32)]
)
def test_block_size_is_what_was_asked_for_or_what_suits_the_platform(asked, platform, size):
    assert EngineConfig(block_size=asked).block_size_on(platform) == size


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_num_seqs", "8"),
        ("block_size", 16.5),
        ("max_num_batched_tokens", 512.0),
        ("max_model_len", "2048"),
        ("kv_cache_memory_bytes", 1e9),
        ("num_blocks_override", 100.0),
        ("max_logprobs", None),
        ("tensor_parallel_size", True),
    ],
)
def test_count_that_is_no_integer_is_refused_by_name(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    message = str(error.value)
    assert message.startswith(name) and "integer" in message and repr(value) in message and "\n" not in message
