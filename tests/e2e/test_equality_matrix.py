"""The engine's equalities as a matrix: whatever the model, the kind of request and the size of a block, what comes out of
a pool so small that somebody always has to go is what each request gives alone, in a pool with room for all, where
nothing is cached, forked or preempted. Not nearly: to the bit, in bfloat16, where a rounding would soon be another token."""

import dataclasses
import functools
import random

import pytest
from engines import (
    Request,
    assert_identical,
    count_swaps,
    make_engine,
    run,
    separately,
    watch_decodes_in_a_row,
)
from kernel_backend import equal_bits_in_bfloat16
from tiny_model import CONFIG, WITH_WINDOW, make_tiny_model, random_weights

from jpaged.config import DEFAULT_MODEL
from jpaged.engine import LLMEngine
from jpaged.outputs import CompletionOutput
from jpaged.sampling_params import SamplingParams
from jpaged.swap_space import SwappedGroup

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
TINY = {"tiny": CONFIG | {"head_dim": 64}, "window": WITH_WINDOW | {"head_dim": 64}}
LOADS = {  # block size: lengths of prompts, output tokens: each sequence comes to its third block at least
    4: ((3, 4, 9, 17), 24),
    16: ((5, 15, 16, 33), 40),
    64: ((46, 50, 62, 20), 100),
}
BLOCKS = {4: 36, 16: 17, 64: 14}  # of the pool, by their size
SAMPLED = {"temperature": 1.0, "top_p": 0.9}
KINDS = {
    "n=1": [{}, {"seed": 5, **SAMPLED}, {"seed": 6, "temperature": 0.7, "top_k": 7}, {"presence_penalty": 0.5}],
    "n=4": [{"n": 4, "seed": 5 + i, **SAMPLED} for i in range(3)] + [{"n": 3}],
    "beam 4": 4 * [{"n": 4, "use_beam_search": True, "logprobs": None}],
    "speculative": [{}, {"seed": 5, "temperature": 0.06}, {"n": 4, "seed": 7, "temperature": 0.06}, {}],
}
WAYS = [
    {"preemption_mode": "swap", "async_scheduling": True, "enable_prefix_caching": True},
    {"preemption_mode": "recompute", "async_scheduling": False, "enable_prefix_caching": True},
    {"preemption_mode": "recompute", "async_scheduling": True, "enable_prefix_caching": False},
]

pytestmark = [equal_bits_in_bfloat16, pytest.mark.long]


@pytest.fixture(
    scope="module",
    params=["tiny", pytest.param("window", marks=pytest.mark.slow), pytest.param("real", marks=pytest.mark.slow)],
)
def model(request, tmp_path_factory) -> str:
    """Tiny ones soon repeat themselves, so that drafts are right: attention and MLP add little to a token."""
    if request.param == "real":
        return DEFAULT_MODEL
    weights = random_weights(TINY[request.param])
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0.3
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), TINY[request.param], weights))


@pytest.fixture(scope="module")
def alone(model, programs_dir):
    """What each request of a load gives by itself, and each sample too."""

    @functools.cache
    def outputs(kind: str, block_size: int) -> list[CompletionOutput]:
        engine = make_engine(
            model, programs_dir, dtype="bfloat16", block_size=block_size, max_model_len=200, enable_prefix_caching=False
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            of_each = separately(engine, requests(kind, block_size), monkeypatch)
        assert engine.scheduler.num_preemptions == 0
        engine.close()
        return of_each

    return outputs


def make_small_engine(model: str, programs_dir: str, kind: str, block_size: int, **way) -> LLMEngine:
    lengths, max_tokens = LOADS[block_size]
    return make_engine(
        model, programs_dir, dtype="bfloat16", block_size=block_size, num_blocks_override=BLOCKS[block_size],
        max_num_batched_tokens=24, max_num_seqs=16, max_model_len=max(lengths) + max_tokens,
        speculative_config=NGRAM if kind == "speculative" else None, **way,
    )  # fmt: skip


def requests(kind: str, block_size: int) -> list[Request]:
    """One of each length; drafts have phrases to repeat."""
    rng, made, (lengths, max_tokens) = random.Random(3), [], LOADS[block_size]
    for fields, length in zip(KINDS[kind], lengths, strict=True):
        tokens = [rng.randrange(3, 250) for _ in range(5 if kind == "speculative" else length)]
        defaults = {"temperature": 0.0, "logprobs": 2, "max_tokens": max_tokens, "ignore_eos": True}
        made.append(Request((tokens * length)[:length], SamplingParams(**defaults | fields)))
    return made


@pytest.mark.parametrize("way", [*WAYS[:2], pytest.param(WAYS[2], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("block_size", LOADS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_small_pool_each_gives_what_it_gives_alone(model, programs_dir, alone, kind, block_size, way):
    small = make_small_engine(model, programs_dir, kind, block_size, **way)
    swaps, times = count_swaps(small), 3 if kind in ("n=1", "n=4") else 5
    got = run(small, times * requests(kind, block_size), check_every_step=True)
    assert_identical(times * alone(kind, block_size), got)
    assert small.scheduler.num_preemptions >= 2, "the pool was meant to be too small"
    assert bool(swaps) == (way["preemption_mode"] == "swap")
    if swaps and kind in ("n=4", "beam 4"):
        assert any(isinstance(swapped, SwappedGroup) for swapped in swaps)
    assert (small.metrics.num_accepted_tokens > 0) == (kind == "speculative")
    small.close()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", LOADS)
@pytest.mark.parametrize("kind", ["n=1", "n=4"])  # drafts and beams are looked at after each step
def test_so_it_does_where_the_device_decodes_several_times_in_a_row(model, programs_dir, alone, kind, block_size):
    """Without log-probs, which come back of one token a step."""
    small = make_small_engine(
        model, programs_dir, kind, block_size, preemption_mode="recompute", async_scheduling=True, num_scheduler_steps=4
    )
    in_a_row = watch_decodes_in_a_row(small)
    load = [Request(r.prompt, dataclasses.replace(r.params, logprobs=None)) for r in requests(kind, block_size)]
    got = run(small, 3 * load, check_every_step=True)
    assert [output.token_ids for output in got] == 3 * [output.token_ids for output in alone(kind, block_size)]
    assert small.scheduler.num_preemptions >= 2 and max(in_a_row) > 1
    small.close()
