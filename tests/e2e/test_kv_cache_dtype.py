"""A quantised KV pool keeps the engine's specification, holds twice the tokens, and stays close to the float pool."""

import dataclasses
import random

import numpy as np
import pytest
from engines import Request, config_of, make_engine, run
from test_dense_reference import dense_logprobs
from tiny_model import random_weights

from jpaged.buckets import Buckets
from jpaged.config import EngineConfig
from jpaged.kv_scales import TEXTS, scales_of
from jpaged.model_runner import make_mesh, plan_step_memory
from jpaged.sampling_params import SamplingParams
from jpaged.step import StepFunction
from models.config import ModelConfig

pytestmark = pytest.mark.long  # two dtypes, several programs each

QUANTISED = ["int8", "fp8"]
LARGEST = {"int8": 127.0, "fp8": 448.0}


@pytest.fixture(scope="module", params=QUANTISED)
def kv_cache_dtype(request) -> str:
    return request.param


def requests() -> list[Request]:
    """Greedy and sampled, around the edges of a block of 16, some with a common beginning."""
    rng = random.Random(0)
    common = [rng.randrange(256) for _ in range(32)]
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 6}]
    made = []
    for number, length in enumerate([1, 15, 16, 17, 33, 50]):
        own = [rng.randrange(256) for _ in range(length)]
        params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, **kinds[number % 3])
        made.append(Request(common + own if number % 2 else own, params))
    return made


def assert_equal(expected, got) -> None:
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    for a, b in zip(expected, got):
        for token, mine, its in zip(a.token_ids, a.logprobs, b.logprobs):
            assert mine[token].logprob == pytest.approx(its[token].logprob, abs=1e-3)


@pytest.fixture(scope="module")
def plain(model, programs_dir, kv_cache_dtype):
    """Room for all, nothing shared, prompts in one piece, one step at a time."""
    engine = make_engine(
        model, programs_dir, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, async_scheduling=False,
        max_num_batched_tokens=256,
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(plain):
    return run(plain, requests(), check_every_step=True)


SMALL = {"num_blocks_override": 14, "max_model_len": 192}  # somebody has to go all the time


def test_alone_is_as_among_neighbours_in_any_order(plain, expected):
    assert_equal(expected, run(plain, requests()[::-1])[::-1])
    assert_equal(expected, [run(plain, [request])[0] for request in requests()])


@pytest.mark.parametrize(
    "kv_cache_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)], indirect=True, scope="module"
)
def test_chunked_cached_swapped_and_overlapped_at_once_change_nothing(model, programs_dir, kv_cache_dtype, expected):
    engine = make_engine(
        model, programs_dir, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=12, preemption_mode="swap", **SMALL
    )
    for _ in range(2):  # the second time on what the first has left in the cache
        assert_equal(expected, run(engine, requests(), check_every_step=True))
        assert engine.metrics.prefix_cache_hits > 0
    assert engine.metrics.num_swapped_out > 0
    engine.close()


def test_samples_beams_and_drafts_among_others_are_what_they_are_alone(model, programs_dir, kv_cache_dtype):
    options = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 12, "block_size": 16}
    options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    load = [
        Request([5, 6, 7] * 8, params),
        Request(list(range(3, 24)), dataclasses.replace(params, n=4, temperature=1.0, seed=3)),
        Request(list(range(40, 59)), dataclasses.replace(params, n=3, use_beam_search=True)),
    ]
    roomy = make_engine(model, programs_dir, enable_prefix_caching=False, **options)
    expected = [output.token_ids for request in load for output in run(roomy, [request])]
    roomy.close()
    small = make_engine(model, programs_dir, preemption_mode="swap", num_blocks_override=14, max_model_len=128, **options)
    got = run(small, 3 * load, check_every_step=True)
    assert [output.token_ids for output in got] == 3 * expected
    assert small.metrics.num_swapped_out > 0 and small.metrics.prefix_cache_hits > 0
    small.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 12},
        {"preemption_mode": "recompute", **SMALL},
        {"preemption_mode": "swap", **SMALL},
        {"preemption_mode": "recompute", "enable_prefix_caching": True, "async_scheduling": True, **SMALL},
        {"num_scheduler_steps": 5, "async_scheduling": True},
    ],
    ids=str,
)
def test_each_alone_changes_nothing(model, programs_dir, kv_cache_dtype, expected, options):
    options = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": 256} | options
    engine = make_engine(model, programs_dir, kv_cache_dtype=kv_cache_dtype, **options)
    for _ in range(2 if options["enable_prefix_caching"] else 1):
        assert_equal(expected, run(engine, requests(), check_every_step=True))
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks_override" in options)
    engine.close()


def kv_scales(engine) -> np.ndarray:
    """[L, 2, K]."""
    (scales,) = (leaf for leaf in engine.runner.leaves if leaf.ndim == 3)
    return np.asarray(scales)


def test_scales_are_of_the_largest_numbers_that_a_dense_model_makes_of_the_texts(model, plain, kv_cache_dtype):
    config = config_of(model)
    largest = np.zeros((config["num_hidden_layers"], 2, config["num_key_value_heads"]))

    def keep(layer, k, v):
        largest[layer] = np.maximum(largest[layer], [np.abs(x).max(axis=(0, 2)) for x in (k, v)])
        return k, v

    for text in TEXTS:
        dense_logprobs(random_weights(), config, plain.tokenizer.encode(text), keep)
    assert (kv_scales(plain) == scales_of(largest, plain.runner.layout)).all()


def test_log_probs_equal_a_dense_model_that_rounds_its_keys_and_values(model, plain, expected, kv_cache_dtype):
    """float64, and the rule written down a second time: over the scale, rounded to nearest, saturated, times the scale.

    So what quantising changes is known to the digit, and is as small as 7 bits, or 3 of mantissa, let it be.
    """
    config = config_of(model)
    scales, limit = kv_scales(plain).astype(np.float64)[..., None], LARGEST[kv_cache_dtype]

    def rounded(x, scale):
        x = np.clip(x / scale, -limit, limit)
        if kv_cache_dtype == "int8":
            return np.round(x) * scale
        ulp = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6) - 3)
        return np.round(x / ulp) * ulp * scale

    def keep(layer, k, v):
        return rounded(k, scales[layer, 0]), rounded(v, scales[layer, 1])

    changes = []
    for request, output in zip(requests(), expected):
        ids = request.prompt + output.token_ids
        of_floats, of_rounded = (
            dense_logprobs(random_weights(), config, ids, **how)[len(request.prompt) - 1 : -1]
            for how in ({}, {"keep": keep})
        )
        for at, entries in enumerate(output.logprobs):
            for candidate, entry in entries.items():
                assert abs(entry.logprob - of_rounded[at, candidate]) < 2e-3
                changes.append(of_rounded[at, candidate] - of_floats[at, candidate])
    print(f"{kv_cache_dtype}: largest {np.abs(changes).max():.4f}, rms {np.std(changes):.4f}")
    rms, largest = {"int8": (0.006, 0.03), "fp8": (0.012, 0.05)}[kv_cache_dtype]
    assert 1e-3 < np.std(changes) < rms and np.abs(changes).max() < largest


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_e4m3"])
def test_the_same_bytes_hold_twice_the_tokens_of_bfloat16(name):
    shape = ModelConfig("llama", "tiny", 64, 32, 48, 3, 4, 2, 64, 8192)

    def plan(kv_cache_dtype):
        config = EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=48 << 20, block_size=16)
        return plan_step_memory(StepFunction(config, shape, make_mesh(1)), Buckets(512, 256, (512,)))

    plain, quantised = plan("auto"), plan(name)
    assert plain.spec.num_blocks == (48 << 20) // (3 * 2 * 2 * 64 * 16 * 2)  # layers, K and V, heads, dim, block, bytes
    assert quantised.spec.num_blocks == 2 * plain.spec.num_blocks
    assert f"tokens, {quantised.cache_dtype} (kv_cache_memory_bytes)" in quantised.table()
