"""The benchmark of speculation misspells what it should, and counts what was drafted."""

import random

import pytest
from bench_speculation import TEXTS, misspelt, run
from tiny_model import make_tiny_model

from jpaged import LLM, SamplingParams

pytestmark = pytest.mark.long  # engines of its own


def test_a_misspelt_text_differs_in_a_tenth_of_its_words():
    for text in TEXTS:
        words, changed = text.split(), misspelt(text, random.Random(0)).split()
        wrong = [i for i, (a, b) in enumerate(zip(words, changed, strict=True)) if a != b]
        assert 0 < len(wrong) <= len(words) // 10
        assert all(sorted(words[i]) == sorted(changed[i]) for i in wrong)


def test_a_run_counts_its_own_drafts(tmp_path, programs_dir):
    llm = LLM(
        str(make_tiny_model(tmp_path)), dtype="float32", block_size=16, max_num_seqs=8, max_num_batched_tokens=64,
        token_buckets=(8, 64), num_blocks_override=128, max_model_len=512, compilation_cache_dir=programs_dir,
        speculative_config={},
    )  # fmt: skip
    prompts, params = [[1, 2, 3] * 5], [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)]
    first, second = run(llm, prompts, params), run(llm, prompts, params)
    assert first[1] == second[1] and len(first[1][0]) == 60
    drafted, accepted, generated, steps = second[2].values()
    assert drafted >= accepted > 0 and generated == 60 and steps == 60 - accepted
    llm.engine.close()
