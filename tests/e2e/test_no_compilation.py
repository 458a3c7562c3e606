"""After warm-up nothing compiles, whatever is asked."""

import random

import jax
import pytest
from engines import Request, make_engine, run
from tiny_model import make_tiny_model

from jpaged.program_cache import compile_counter
from jpaged.sampling_params import SamplingParams

MANY = pytest.param(1000, marks=pytest.mark.long)


def fuzzed_request(rng: random.Random) -> Request:
    kinds = {
        "temperature": [0, 0.5, 1.0, 2.0],
        "top_k": [0, 1, 40],
        "top_p": [1.0, 0.9, 0.1],
        "min_p": [0.0, 0.1],
        "seed": [None, 1, 2**63],
        "min_tokens": [0, 3],
        "presence_penalty": [0, 1.5],
        "repetition_penalty": [1, 1, 1.2],
        "logit_bias": [{}, {}, {5: 3, 7: -100}],
        "allowed_token_ids": [None, None, range(60, 90)],
        "bad_words": [(), ("a", "bcd")],
        "stop": [(), ("a",), ("\x00", "zz")],
        "stop_token_ids": [(), (5,), tuple(range(20))],
        "ignore_eos": [False, True],
        "logprobs": [None, 0, 5, 20],
    }
    fields = {name: rng.choice(values) for name, values in kinds.items()}
    prompt = [rng.randrange(258) for _ in range(rng.choice([1, 2, 15, 16, 17, 60, 200]))]
    max_tokens, kind = rng.randint(3, 40), rng.random()
    if kind < 0.1:
        prompt, max_tokens, fields["n"] = prompt[:40], min(max_tokens, 20), rng.choice([2, 3])
        fields["best_of"] = rng.choice([None, 4])
    elif kind < 0.2:
        prompt, max_tokens = prompt[:40], min(max_tokens, 20)
        fields |= {"use_beam_search": True, "n": rng.choice([2, 4]), "temperature": 0, "min_tokens": 0}
        for name in fields.keys() - {"use_beam_search", "n", "temperature", "seed", "stop_token_ids", "ignore_eos"}:
            del fields[name]
        fields["stop_token_ids"] = fields["stop_token_ids"][:2]
    elif kind < 0.3:
        fields["prompt_logprobs"] = rng.choice([0, 5])
    elif kind < 0.35:
        fields["logits_processors"] = [lambda output_token_ids, logits: logits]
    return Request(prompt, SamplingParams(max_tokens=max_tokens, **fields))


@pytest.mark.parametrize("num_requests", [300, MANY])
def test_fuzzed_requests_compile_nothing_after_warm_up(tmp_path, programs_dir, num_requests):
    engine = make_engine(str(make_tiny_model(tmp_path)), programs_dir, num_blocks_override=24, max_model_len=256)
    engine.runner.programs.compile_all()
    assert engine.runner.programs.is_complete
    engine.runner.programs.is_sealed = True
    before = compile_counter.num_events
    rng = random.Random(0)
    requests = [fuzzed_request(rng) for _ in range(num_requests)]
    outputs = run(engine, requests, check_every_step=True)
    assert len(outputs) == sum(request.params.n for request in requests) > num_requests
    assert all(output.finish_reason in ("stop", "length") for output in outputs)
    assert engine.scheduler.num_preemptions > 0, "the pool was meant to be too small for all"
    assert compile_counter.num_events == before
    assert engine.metrics.snapshot()["xla_compiles{phase=serving}"] == 0
    engine.close()


def test_the_counter_sees_a_compilation():
    before = compile_counter.num_compiled
    jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    assert compile_counter.num_compiled == before + 1
