"""The log-probs of a prompt are those that its tokens have as continuations, however the prompt is computed."""

import pytest
from engines import Request, break_steps, make_engine
from tiny_model import CONFIG

from jpaged.output_processor import RequestOutputBuilder
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

VOCAB = CONFIG["vocab_size"]
PROMPTS = [[(7 * i * i + n) % 250 for i in range(n)] for n in (1, 2, 9, 40, 75)]
CONFIGS = {
    "overlap, chunks, cached prefixes, and preemption": {"num_blocks_override": 8, "max_model_len": 112},
    "no overlap": {"num_blocks_override": 8, "max_model_len": 112, "async_scheduling": False},
    "several decodes in a row": {"num_scheduler_steps": 5},
}


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    engine = make_engine(model, programs_dir, max_logprobs=VOCAB, max_num_batched_tokens=8)
    yield engine
    engine.close()


def run(engine, requests: list[Request]) -> list[RequestOutput]:
    builders = {str(i): RequestOutputBuilder(str(i), None, request.prompt) for i, request in enumerate(requests)}
    for request_id, request in zip(builders, requests, strict=True):
        engine.add_request(request_id, request.prompt, request.params)
    while engine.has_work:
        for delta in engine.step():
            builders[delta.request_id].add(delta)
        engine.kv.check_invariants(engine.scheduler.sequences)
    assert engine.kv.pool.num_used == 0
    return [builder.output for builder in builders.values()]


def requests(num_top=2) -> list[Request]:
    """Beside each prompt one that only decodes."""
    wanting = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, prompt_logprobs=num_top)
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=34, ignore_eos=True)
    return [request for prompt in PROMPTS for request in (Request(prompt[::-1], plain), Request(prompt, wanting))]


@pytest.fixture(scope="module")
def expected(engine):
    return run(engine, requests())


def test_each_token_has_the_logprob_that_it_has_after_the_tokens_before_it(engine, expected):
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB)
    for output in expected[1::2]:
        prompt = output.prompt_token_ids
        assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
        for position in range(1, len(prompt), 6):
            [after] = run(engine, [Request(prompt[:position], one)])
            whole = after.outputs[0].logprobs[0]
            found = output.prompt_logprobs[position]
            assert next(iter(found)) == prompt[position]
            best = sorted(whole, key=lambda token: whole[token].rank)[:2]
            assert set(found) == {prompt[position], *best}
            for token, entry in found.items():
                assert entry.logprob == pytest.approx(whole[token].logprob, abs=1e-4)
                assert (entry.rank, entry.decoded_token) == (whole[token].rank, engine.tokenizer.decoded_token(token))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_neither_the_way_of_a_prompt_nor_its_neighbours_change_them(model, programs_dir, expected, config):
    other = make_engine(model, programs_dir, max_logprobs=VOCAB, max_num_batched_tokens=8, **config)
    for _ in range(2):  # a second time with the first one's blocks in the prefix cache
        for got, want in zip(run(other, requests()), expected, strict=True):
            assert got.outputs[0].token_ids == want.outputs[0].token_ids
            if want.prompt_logprobs is None:
                assert got.prompt_logprobs is None
                continue
            assert got.num_cached_tokens == 0  # what is cached has no logits
            for one, other_one in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
                assert one.keys() == other_one.keys()
                assert all(one[t].logprob == pytest.approx(other_one[t].logprob, abs=1e-4) for t in one)
    assert ("num_blocks_override" not in config) or other.scheduler.num_preemptions > 0
    other.close()


def test_they_are_whole_after_a_step_that_failed(engine, expected, monkeypatch):
    break_steps(engine, monkeypatch, lambda number, step: number in (2, 9))
    for got, want in zip(run(engine, requests()), expected, strict=True):
        assert (got.prompt_logprobs is None) == (want.prompt_logprobs is None)
        assert [list(p or ()) for p in got.prompt_logprobs or ()] == [list(p or ()) for p in want.prompt_logprobs or ()]


def test_a_request_that_ends_amid_its_prompt_has_none_of_them(engine):
    engine.add_request("gone", PROMPTS[3], SamplingParams(max_tokens=1, prompt_logprobs=1))
    for _ in range(3):
        assert engine.step() == []
    [last] = engine.abort("gone")
    assert (last.finish_reason, last.prompt_logprobs) == ("abort", None)
    while engine.has_work:
        engine.step()
