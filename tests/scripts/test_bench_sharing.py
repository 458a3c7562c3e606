"""The benchmark of sharing counts what forks save, and nothing else."""

import pytest
from bench_sharing import measure
from engines import make_engine
from tiny_model import make_tiny_model

from jpaged.sampling_params import SamplingParams

pytestmark = pytest.mark.long  # an engine of its own


def test_the_saving_is_that_of_the_prompts_full_blocks(tmp_path, programs_dir):
    engine = make_engine(str(make_tiny_model(tmp_path)), programs_dir, enable_prefix_caching=False)
    alone = measure(engine, [[5] * 40, [6] * 40], SamplingParams(max_tokens=4, ignore_eos=True), "alone")
    assert alone["saving"] == 0 and alone["logical"] == alone["physical"] > 0
    shared = measure(engine, [[5] * 32], SamplingParams(n=3, max_tokens=9, seed=1, ignore_eos=True), "three")
    # while three decode: two blocks of the prompt, and each its own; with the prompt alone nobody has written yet
    num_steps = shared["physical"] // 5
    assert num_steps > 5 and 0.4 < shared["saving"] < 0.5
    engine.close()
