"""The whole engine on whatever chip there is, in the shapes that its kernels take: bfloat16, heads of 64."""

import numpy as np
from engines import Request, make_engine, run
from test_dense_reference import dense_logprobs
from tiny_model import CONFIG, make_tiny_model, random_weights

from jpaged.sampling_params import SamplingParams

TINY = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def test_requests_in_bfloat16_follow_the_dense_model(tmp_path, programs_dir):
    """Prompts over several chunks, decodes among prefills, a prefix that is shared."""
    weights = random_weights(TINY)
    folder = str(make_tiny_model(tmp_path, TINY, weights))
    engine = make_engine(folder, programs_dir, dtype="bfloat16", enable_prefix_caching=True)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 250, length).tolist() for length in (1, 2, 16, 31, 64, 150)]
    prompts.append(prompts[-1][:100] + prompts[0])
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    outputs = run(engine, [Request(prompt, greedy) for prompt in prompts], check_every_step=True)
    worst = 0.0
    for prompt, output in zip(prompts, outputs):
        dense = dense_logprobs(weights, TINY, prompt + output.token_ids)[len(prompt) - 1 : -1]
        given = np.array([entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs)])
        worst = max(worst, np.abs(given - dense[np.arange(len(given)), output.token_ids]).max())
    engine.close()
    assert worst < 0.05, worst  # 0.005 on CPU; a kernel may round its weights to bfloat16 too
