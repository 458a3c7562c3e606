"""Layers that see a sliding window: Hugging Face's tokens, in blocks that are given back when the window has passed."""

import json
from pathlib import Path

import pytest
from engines import Request, assert_same, make_engine, run
from tiny_model import CONFIG, make_tiny_model, random_weights

from jpaged.sampling_params import SamplingParams

CASES = json.loads((Path(__file__).parent.parent / "fixtures" / "windows_greedy.json").read_text())["cases"]
GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=2)
SIZE, CHUNK, LENGTH = 4, 32, 200


@pytest.fixture(
    scope="module",
    params=[CASES[0], pytest.param(CASES[1], marks=pytest.mark.long)],
    ids=lambda case: case["config"]["model_type"],
)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory) -> str:
    config = CONFIG | case["config"]
    return str(make_tiny_model(tmp_path_factory.mktemp("windows"), config, random_weights(config)))


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    engine = make_engine(
        model,
        programs_dir,
        block_size=SIZE,
        max_num_batched_tokens=CHUNK,
        max_model_len=LENGTH + 50,
        num_blocks_override=600,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def requests(case):
    return [Request(output["prompt_token_ids"], GREEDY) for output in case["outputs"]]


def check(case, outputs):
    for output, expected in zip(outputs, case["outputs"], strict=True):
        assert output.token_ids == expected["token_ids"]
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs)]
        assert logprobs == pytest.approx(expected["logprobs"], abs=1e-4)


def test_tokens_are_those_of_hugging_face_cold_and_from_the_cache(engine, case, requests):
    check(case, run(engine, requests, check_every_step=True))
    hits = engine.metrics.prefix_cache_hits
    check(case, run(engine, requests, check_every_step=True))
    assert engine.metrics.prefix_cache_hits - hits == sum((len(r.prompt) - 1) // SIZE * SIZE for r in requests)


def test_a_prompt_that_goes_another_way_hits_as_far_as_every_window_is_still_cached(engine, case):
    engine.kv.reset_prefix_cache()
    expected = case["outputs"][-1]
    prompt, window = expected["prompt_token_ids"], case["config"]["sliding_window"]
    run(engine, [Request(prompt, GREEDY)])
    cache, hashes = engine.kv.prefix_cache, []
    cache.extend_hashes(hashes, prompt, len(prompt) // SIZE)
    group = next(g for g, seen in enumerate(engine.spec.windows) if seen == window)
    for length, num_hit in ((16, 12), (17, 16), (29, 16), (44, 16), (45, 44), (len(prompt), 68)):
        for content in hashes[4:6]:  # tokens 16 to 23 are gone, of one windowed group
            cache.evict(cache.blocks[content][group])
        hits = engine.metrics.prefix_cache_hits
        run(engine, [Request(prompt[: length - 1] + [5], GREEDY)])
        assert engine.metrics.prefix_cache_hits - hits == num_hit, length
        run(engine, [Request(prompt[:25], GREEDY)])  # and cached again
    check({"outputs": [expected]}, run(engine, [Request(prompt, GREEDY)]))


def test_a_sequence_never_holds_more_of_a_windowed_group_than_a_step_sees_and_writes(engine, case):
    window, windows = case["config"]["sliding_window"], engine.spec.windows
    prompt = case["outputs"][-1]["prompt_token_ids"] * 2
    engine.add_request("long", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    most, late = [0] * len(windows), None
    while engine.has_work:
        engine.step()
        held = engine.snapshot()["num_blocks_of_groups"]
        told = [count for name, count in engine.stats().items() if name.startswith("num_blocks_of_group")]
        assert told == (held if len(held) > 1 else [])
        most = list(map(max, most, held))
        if engine.scheduler.running and engine.scheduler.running[0].num_tokens == len(prompt) + 50:
            late = held
            drawn = engine.memory_map()
    for seen, num_most, num_late in zip(windows, most, late, strict=True):
        if seen is None:
            assert (num_most, num_late) == (200 // SIZE, -(-len(prompt) // SIZE) + 50 // SIZE + 1)
        else:
            assert num_most <= (window + 2 * CHUNK) // SIZE + 2 and num_late <= window // SIZE + 2
    assert f"last {window}" in drawn and ("all" in drawn) == (None in windows)
    assert sum(most) <= engine.spec.num_blocks_for(200) + 2 * CHUNK // SIZE * len(windows)


def test_a_prompt_that_fills_the_pool_is_served_whatever_of_it_is_cached(model, programs_dir, case, engine):
    """The tightest pool: the context is as long as it allows, or endless where all layers have windows."""
    tight = make_engine(
        model, programs_dir, block_size=SIZE, max_num_batched_tokens=CHUNK, max_model_len=None,
        num_blocks_override={"mistral": 16, "ministral": 26}[case["config"]["model_type"]],
    )  # fmt: skip
    length = min(tight.max_model_len, LENGTH)
    prompt = (case["outputs"][-1]["prompt_token_ids"] * 3)[: length - 4]
    whole = Request(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2))
    expected = run(engine, [whole])
    for num_shared in (0, length // 3, length // 2, length - 20, length - 8):
        run(tight, [Request([*prompt[:num_shared], 5], SamplingParams(temperature=0, max_tokens=1))])
        assert_same(expected, run(tight, [whole], check_every_step=True))
    tight.close()


def test_neighbours_preemption_forks_and_overlap_change_nothing(model, programs_dir, case, requests):
    """In a pool in which somebody always has to go, both ways back."""
    samples = [
        Request(r.prompt, SamplingParams(temperature=1, seed=3, n=3, max_tokens=30, logprobs=2)) for r in requests
    ]
    expected = None
    for mode, overlap in (("swap", True), ("recompute", True), ("swap", False)):
        engine = make_engine(
            model, programs_dir, block_size=SIZE, max_num_batched_tokens=CHUNK, max_model_len=128,
            preemption_mode=mode, async_scheduling=overlap, max_num_seqs=8,
            num_blocks_override={"mistral": 32, "ministral": 52}[case["config"]["model_type"]],
        )  # fmt: skip
        check(case, run(engine, requests, check_every_step=True))
        if expected is None:
            expected = [run(engine, [request]) for request in samples]
        together = run(engine, samples + requests, check_every_step=True)
        for one in expected:
            assert_same(one, together[: len(one)])
            together = together[len(one) :]
        check(case, together)
        assert engine.scheduler.num_preemptions > 0
        engine.close()


def test_a_model_of_windows_alone_outlives_its_pool(tmp_path, programs_dir):
    config = CONFIG | CASES[0]["config"]
    engine = make_engine(
        str(make_tiny_model(tmp_path, config, random_weights(config))), programs_dir,
        block_size=SIZE, max_num_batched_tokens=CHUNK, num_blocks_override=16, max_model_len=None,
    )  # fmt: skip
    assert engine.spec.num_usable_blocks * SIZE < 180 // 2
    (output,) = run(engine, [Request([7, 8, 9], SamplingParams(temperature=0, max_tokens=180, ignore_eos=True))])
    assert len(output.token_ids) == 180
    engine.close()
