"""The synthetic trace, and what the waste benchmark makes of traces."""

import statistics

import pytest
from bench_kv_waste import run_trace
from make_synthetic_trace import MAX_TOTAL, PUBLISHED, describe, make_trace

from jpaged.bench.traces import SHAREGPT_LIKE, read_lengths

LIMITS = {"pool_tokens": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def test_the_papers_lengths_have_the_papers_means(data_dir):
    path = data_dir / "sharegpt_paper" / "sharegpt_opt_lengths_le2048.csv.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    inputs, outputs = zip(*read_lengths(path, MAX_TOTAL))
    assert statistics.fmean(inputs) == pytest.approx(161.31, abs=0.005)
    assert statistics.fmean(outputs) == pytest.approx(337.99, abs=0.005)


def test_the_synthetic_trace_has_the_published_quantiles_and_is_what_its_script_makes():
    trace = read_lengths(SHAREGPT_LIKE)
    assert trace == make_trace(2000, 0)
    assert max(map(sum, trace)) <= MAX_TOTAL
    for column, published in zip(zip(*trace), PUBLISHED.values()):
        assert describe(column) == pytest.approx(published, rel=2e-3)


def test_waste_of_one_request_by_hand():
    # 3 tokens of prompt in one step, then one token a step: 3, 4, 5 tokens in blocks of 4.
    waste = run_trace([(3, 3)], block_size=4, **LIMITS)
    assert waste.shares == pytest.approx([1 / 4, 0, 3 / 8])


def test_waste_of_a_chunked_prompt_and_a_neighbour_by_hand():
    # The second prompt gets what the budget of 4 leaves: steps of 3 + 1, 1 + 3, 1 + 2 tokens.
    limits = {**LIMITS, "max_num_batched_tokens": 4}
    waste = run_trace([(3, 3), (6, 1)], block_size=4, **limits)
    assert waste.shares == pytest.approx([1 - 4 / 8, 1 - 8 / 8, 1 - 11 / 16])


def test_blocks_of_one_token_waste_nothing_and_larger_ones_waste_more():
    trace = make_trace(100, 0)
    limits = {**LIMITS, "pool_tokens": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    means = [run_trace(trace, block_size=size, **limits).mean for size in (1, 16, 64)]
    assert means[0] == pytest.approx(0) and 0 < means[1] < means[2]


def test_a_request_over_the_pool_is_refused():
    with pytest.raises(ValueError, match="100 tokens does not fit in a pool of 64"):
        run_trace([(90, 10)], block_size=16, **LIMITS)
