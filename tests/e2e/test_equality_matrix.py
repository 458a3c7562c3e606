"""Every kind of request, on every kind of model, with blocks of every size, in pools in which somebody always has to go:
each gives what it gives alone where there is room for it."""

import random

import pytest
from engines import SMALL_POOLS, Request, assert_equal, make_engine, run
from tiny_model import CONFIG, WITH_WINDOW, make_tiny_model, random_weights

from jpaged.config import DEFAULT_MODEL
from jpaged.engine import LLMEngine
from jpaged.sampling_params import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
DRAWN = {"temperature": 0.8, "top_p": 0.9}
KINDS = {
    "n=1": [{"temperature": 0}, DRAWN],
    "n=4": [{"n": 4, **DRAWN}],
    "beam 4": [{"n": 4, "use_beam_search": True, "temperature": 0, "logprobs": None}],
    "speculative": [{"temperature": 0}, {"temperature": 0.06}],
}
LONGEST = 60  # tokens of prompt and output


@pytest.fixture(scope="module", params=["tiny", "window", DEFAULT_MODEL])
def model(request, tmp_path_factory) -> str:
    """The tiny ones soon repeat themselves, so that drafts are right: attention and MLP add little to a token."""
    if request.param == DEFAULT_MODEL:
        return DEFAULT_MODEL
    config = {"tiny": CONFIG, "window": WITH_WINDOW}[request.param]
    weights = random_weights(config)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0.3
    return str(make_tiny_model(tmp_path_factory.mktemp(request.param), config, weights))


def requests(kind: str) -> list[Request]:
    """Seeded, around the edges of blocks, two with a common beginning; their prompts repeat themselves."""
    rng = random.Random(3)
    phrases = [[rng.randrange(3, 250) for _ in range(9)] for _ in range(3)]
    made = []
    for number, length in enumerate((15, 9, 33, 20, 16)):
        prompt = (phrases[number % 3] * 4)[:length]
        fields = KINDS[kind][number % len(KINDS[kind])]
        params = {"max_tokens": 18 + number, "seed": number, "logprobs": 2, "ignore_eos": True} | fields
        made.append(Request(prompt, SamplingParams(**params)))
    return made


@pytest.fixture(scope="module")
def expected(engine: LLMEngine) -> dict:
    return {kind: [output for one in requests(kind) for output in run(engine, [one])] for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["4", "16, several decodes", "64"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_request_gives_in_a_small_pool_what_it_gives_alone(model, programs_dir, expected, kind, pool):
    options = dict(SMALL_POOLS[pool])
    if kind == "speculative":
        options |= {"num_scheduler_steps": 1, "speculative_config": NGRAM}
    small = make_engine(model, programs_dir, max_model_len=LONGEST, max_num_batched_tokens=16, **options)
    assert_equal(3 * expected[kind], run(small, 3 * requests(kind), check_every_step=True))
    assert small.scheduler.num_preemptions > 0, "the pool was meant to be too small"
    assert (small.stats()["spec_decode_num_accepted_tokens"] > 0) == (kind == "speculative")
    small.close()
