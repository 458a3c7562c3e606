"""What is asked for."""

import argparse
import statistics
from collections import Counter

import pytest

from jpaged.bench.workloads import Workload, add_workload_flags


def workload(*flags: str, seed: int = 0) -> Workload:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_workload_flags(parser)
    return Workload(parser.parse_args(flags), seed)


def test_random_lengths_lie_in_the_range_of_the_ratio():
    lengths = ["--input-len", "100", "--output-len", "10", "--random-range-ratio", "0.5"]
    rows = workload("--num-prompts", "2000", *lengths).rows
    inputs, outputs, _ = zip(*rows)
    assert (min(inputs), max(inputs)) == (50, 150) and (min(outputs), max(outputs)) == (5, 15)
    assert statistics.fmean(inputs) == pytest.approx(100, rel=0.03)


def test_without_a_ratio_all_lengths_are_equal_and_vllms_defaults():
    assert set(workload("--num-prompts", "3").rows) == {(1024, 128, None)}


def test_sharegpt_like_lengths_have_its_means_and_come_twice_only_where_they_must():
    inputs, outputs, _ = zip(*workload("--dataset-name", "sharegpt-like", "--num-prompts", "2000").rows)
    assert statistics.fmean(inputs) == pytest.approx(161.31, abs=0.01)
    assert statistics.fmean(outputs) == pytest.approx(337.99, abs=0.01)
    assert len(workload("--dataset-name", "sharegpt-like", "--num-prompts", "2500").rows) == 2500
    short = workload("--dataset-name", "sharegpt-like", "--max-total-len", "100").rows
    assert len(short) == 100 and max(row.input_len + row.output_len for row in short) <= 100


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    flags = ["--num-prompts", "5", "--input-len", "30", "--random-range-ratio", "0.5"]
    assert workload(*flags).requests(1000) == workload(*flags).requests(1000)
    assert workload(*flags).requests(1000) != workload(*flags, seed=1).requests(1000)


def test_each_call_gives_fresh_prompts_of_the_same_lengths():
    one = workload("--num-prompts", "20", "--input-len", "30", "--random-range-ratio", "0.5")
    first, second = one.requests(1000), one.requests(1000)
    assert [len(request.prompt) for request in first] == [len(request.prompt) for request in second]
    assert not {tuple(request.prompt) for request in first} & {tuple(request.prompt) for request in second}
    assert all(0 <= token < 7 for request in one.requests(7) for token in request.prompt)
    assert len(one.requests(7, limit=2)) == 2


def test_prefixes_are_shared_evenly_and_stand_before_the_prompt():
    requests = workload(
        "--num-prompts", "12", "--input-len", "5", "--prefix-len", "16", "--num-prefixes", "3"
    ).requests(1000)
    prefixes = Counter(tuple(request.prompt[:16]) for request in requests)
    assert sorted(prefixes.values()) == [4, 4, 4]
    assert {len(request.prompt) for request in requests} == {21}


def test_a_trace_keeps_its_order_and_its_arrivals(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input,output\n1,3,4\n2,900,6\n5,7,8\n")
    one = workload("--trace", str(path), "--max-total-len", "100")
    assert [(len(r.prompt), r.output_len, r.timestamp) for r in one.requests(50)] == [(3, 4, 1.0), (7, 8, 5.0)]
    assert one.has_timestamps
    with pytest.raises(ValueError, match="holds 2 requests that can be used, and --num-prompts is 3"):
        workload("--trace", str(path), "--max-total-len", "100", "--num-prompts", "3")
