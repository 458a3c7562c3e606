"""A row of logits that is no distribution ends its own request, and changes nothing for anybody else."""

import dataclasses

import pytest
from engines import Request, make_engine, run
from tiny_model import CONFIG, make_tiny_model, random_weights

from jpaged.sampling_params import SamplingParams
from jpaged.sequence import Sequence

POISON = 200  # a token whose embedding is not a number
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    weights = random_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    config = CONFIG | {"tie_word_embeddings": False}
    return str(make_tiny_model(tmp_path_factory.mktemp("poisoned"), config, weights))


@pytest.mark.parametrize(
    ("overlap", "num_steps", "prefix_caching"), [(True, 1, True), (False, 1, False), (True, 5, True)]
)
def test_a_request_whose_logits_are_not_numbers_fails_alone(model, programs_dir, overlap, num_steps, prefix_caching):
    engine = make_engine(
        model, programs_dir, async_scheduling=overlap, num_scheduler_steps=num_steps, max_num_batched_tokens=8,
        enable_prefix_caching=prefix_caching, num_blocks_override=14, max_model_len=160,
    )  # fmt: skip
    good = [Request([7, 8, 9] * n, kind) for n in (1, 7, 13) for kind in (GREEDY, DRAWN)]
    expected = [output.token_ids for output in run(engine, good)]
    # one is bad from its first token on, one brings the poison upon itself by a bias
    sampled = SamplingParams(temperature=0, max_tokens=12, logit_bias={POISON: 100})
    processed = dataclasses.replace(DRAWN, logits_processors=[lambda output, logits: logits * 0])
    bad = [Request([POISON, *range(40)], GREEDY), Request([5, 6], sampled), Request([5, POISON], processed)]
    for _ in range(2):  # again in the blocks that they left behind
        outputs = run(engine, [bad[0], *good[:3], bad[1], *good[3:], bad[2]], check_every_step=True)
        failed = [outputs.pop(-1), outputs.pop(4), outputs.pop(0)]
        assert [output.token_ids for output in outputs] == expected
        assert [output.token_ids for output in failed] == [[], [POISON], []]
        for output in failed:
            assert (output.finish_reason, output.error) == ("error", "the model's logits are not finite numbers")
    poisoned, _ = engine.kv.match_prefix(Sequence("again", bad[0].prompt, GREEDY, seed=0, max_tokens=1))
    assert poisoned == [], "what gave no numbers must not be shared"
    engine.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_group_whose_logits_are_not_numbers_fails_alone(model, programs_dir, overlap):
    """Samples and beams; neighbours have forks and drafts."""
    engine = make_engine(
        model, programs_dir, async_scheduling=overlap, max_num_batched_tokens=16, num_blocks_override=20,
        max_model_len=128, speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    samples, beams = dataclasses.replace(DRAWN, n=3), dataclasses.replace(GREEDY, n=2, use_beam_search=True)
    good = [Request([7, 8, 9] * 5, GREEDY), Request([11] * 20, samples), Request([5, 6], beams)]
    expected = [output.token_ids for request in good for output in run(engine, [request])]
    bad = [Request([5, POISON, 7], samples), Request([POISON, 8], beams)]
    for _ in range(2):
        outputs = run(engine, [bad[0], *good, bad[1]], check_every_step=True)
        assert [output.token_ids for output in outputs[3:9]] == expected
        failed = outputs[:3] + outputs[9:]
        assert {(output.finish_reason, output.error) for output in failed} == {
            ("error", "the model's logits are not finite numbers")
        }
        assert not any(output.token_ids for output in failed)
    engine.close()


def test_a_pinned_prefix_outlives_a_request_that_goes_on_from_it_without_numbers(model, programs_dir):
    engine = make_engine(model, programs_dir, max_num_batched_tokens=8, num_blocks_override=14, max_model_len=160)
    prefix = list(range(20, 56))  # two full blocks and four tokens
    engine.pin_prefix(prefix)
    while engine.has_work:
        engine.step()
    for _ in range(2):
        engine.add_request("bad", [*prefix, POISON], GREEDY)
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        assert (deltas[-1].finish_reason, deltas[-1].num_cached_tokens) == ("error", 36)
        engine.kv.check_invariants([])
    engine.close()


def test_a_request_that_bans_every_token_that_it_allows_says_so(model, programs_dir):
    engine = make_engine(model, programs_dir, max_num_batched_tokens=8, num_blocks_override=14, max_model_len=160)
    with pytest.raises(ValueError, match="^allowed_token_ids leaves no token to sample"):
        engine.validate([1], SamplingParams(allowed_token_ids=[64], bad_words=["a"]))
    nothing = SamplingParams(allowed_token_ids=[64], bad_words=["aa"], max_tokens=3)  # which shows at the second token
    good = Request([7, 8, 9], GREEDY)
    alone = run(engine, [good])[0].token_ids
    failed, other = run(engine, [Request([1], nothing), good], check_every_step=True)
    assert (failed.finish_reason, failed.token_ids) == ("error", [64]) and failed.error.startswith("no token is left")
    assert other.token_ids == alone
    engine.close()
