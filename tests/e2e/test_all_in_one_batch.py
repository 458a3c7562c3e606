"""Everything at once, in one batch and a pool too small for it: each request gives what it gives alone."""

import random

import pytest
from engines import CLOSE, Request, assert_equal, assert_identical, count_swaps, make_engine, run_whole
from kernel_backend import equal_bits_in_bfloat16

from jpaged.sampling_params import SamplingParams

LENGTH = 66


def make_requests() -> list[Request]:
    rng = random.Random(4)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(length)]

    def params(**fields) -> SamplingParams:
        return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 2} | fields)

    known = prompt(35)
    beams = {"n": 4, "use_beam_search": True, "logprobs": None, "max_tokens": 12}
    return [
        Request(known, params()),
        Request(prompt(20), params(n=4, temperature=1.0, seed=5, max_tokens=40)),
        Request(prompt(18), params(**beams)),
        Request(prompt(6) * 5, params()),
        Request(known + prompt(3), params(temperature=0.8, top_p=0.9, seed=6)),  # the first one's prefix is cached
        Request(prompt(25), params(presence_penalty=1.0, logit_bias={7: 3.0}, prompt_logprobs=1)),
        Request(prompt(50), params(temperature=1.2, top_k=9, seed=7)),
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float32", marks=pytest.mark.long), pytest.param("bfloat16", marks=equal_bits_in_bfloat16)],
)
def test_each_request_gives_in_the_batch_what_it_gives_alone(model, programs_dir, overlap, dtype):
    """In bfloat16, in which a product's roundings do not depend on what is beside it, to the bit."""
    sizes = {"max_num_seqs": 16, "max_model_len": 128, "dtype": dtype}
    roomy = make_engine(model, programs_dir, enable_prefix_caching=False, **sizes)
    requests = make_requests()
    alone = [run_whole(roomy, [request])[0] for request in requests]
    assert roomy.scheduler.num_preemptions == 0
    roomy.close()
    small = make_engine(
        model, programs_dir, num_blocks_override=21, preemption_mode="swap", async_scheduling=overlap,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3}, **sizes,
    )  # fmt: skip
    swaps = count_swaps(small)
    run_whole(small, requests[:1])  # what it leaves in the cache is there for others, and for itself
    together = run_whole(small, 2 * requests, check_every_step=True)
    for one, other in zip(2 * alone, together, strict=True):
        if dtype == "bfloat16":
            assert_identical(one.outputs, other.outputs)
            assert one.prompt_logprobs == other.prompt_logprobs
        else:
            assert_equal(one.outputs, other.outputs)
            assert_prompts_close(one.prompt_logprobs, other.prompt_logprobs)
    assert swaps and small.metrics.prefix_cache_hits > 0 and small.metrics.num_accepted_tokens > 0
    small.close()


def assert_prompts_close(first: list | None, second: list | None) -> None:
    assert (first is None) == (second is None)
    for one, other in zip(first or [], second or [], strict=True):
        assert (one or {}).keys() == (other or {}).keys()
        for token in one or {}:
            assert other[token].logprob == pytest.approx(one[token].logprob, abs=CLOSE)
