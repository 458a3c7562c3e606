"""The numbers of a serving run, against numbers made by hand."""

import argparse

import pytest

from jpaged.bench.outcomes import Outcome
from jpaged.bench.report import block, details, failures, goodput_limit, summarise

OUTCOMES = [
    Outcome(prompt_len=10, scheduled=0.0, sent=0.0, token_times=[0.1, 0.2, 0.4], num_output_tokens=3),
    Outcome(prompt_len=20, scheduled=1.0, sent=1.25, token_times=[1.55, 1.65], num_output_tokens=3),  # two in a chunk
    Outcome(prompt_len=30, scheduled=1.5, sent=1.5, token_times=[1.7], num_output_tokens=1),
    Outcome(prompt_len=99, scheduled=1.6, sent=1.6, token_times=[1.7, 1.8], num_output_tokens=2, error="it broke"),
]


@pytest.fixture
def numbers() -> dict:
    return summarise(OUTCOMES, 2.0, [50.0, 99.0], {"ttft": 250.0, "tpot": 100.0})


def test_failed_requests_count_as_failed_and_as_nothing_else(numbers):
    assert (numbers["completed"], numbers["failed"]) == (3, 1)
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (60, 7)
    assert numbers["request_throughput"] == 1.5
    assert (numbers["output_throughput"], numbers["total_token_throughput"]) == (3.5, 33.5)


def test_latencies_by_hand(numbers):
    # ttft 100, 300, 200; tpot (400 - 100) / 2 = 150 and (400 - 300) / 2 = 50; itl 100, 200, 100; e2el 400, 400, 200
    assert numbers["mean_ttft_ms"] == pytest.approx(200) and numbers["median_ttft_ms"] == pytest.approx(200)
    assert numbers["p99_ttft_ms"] == pytest.approx(298)  # linear: 200 + 0.98 * 100
    assert numbers["mean_tpot_ms"] == pytest.approx(100) and numbers["p99_tpot_ms"] == pytest.approx(149)
    assert numbers["mean_itl_ms"] == pytest.approx(400 / 3) and numbers["p50_itl_ms"] == pytest.approx(100)
    assert numbers["mean_e2el_ms"] == pytest.approx(1000 / 3)
    assert numbers["std_ttft_ms"] == pytest.approx((2 / 3) ** 0.5 * 100)
    assert numbers["max_send_delay_ms"] == pytest.approx(250)


def test_goodput_counts_requests_within_every_limit(numbers):
    # the first is too slow a token, the second waits too long for its first; a single token has no time per token
    assert numbers["request_goodput"] == pytest.approx(0.5)


def test_the_block_has_vllms_lines_in_vllms_columns(numbers):
    lines = block(numbers, [99.0], request_rate=4.0, max_concurrency=8).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert lines[1] == "Successful requests:                     3"
    assert "Request rate configured (RPS):           4.00" in lines
    assert "Maximum request concurrency:             8" in lines
    assert "Output token throughput (tok/s):         3.50" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "P99 TTFT (ms):                           298.00" in lines
    assert "Median E2EL (ms):                        400.00" in lines


def test_a_run_without_a_success_has_no_latency():
    numbers = summarise(OUTCOMES[3:], 1.0, [99.0])
    assert numbers["mean_ttft_ms"] is None
    assert "P99 ITL (ms):                            n/a" in block(numbers, [99.0])


def test_failures_tell_the_first_error_and_how_many_of_each_kind():
    assert failures(OUTCOMES[:3]) == ""
    assert failures(OUTCOMES) == "1 of 4 requests failed; the first was request 3: it broke"
    assert "  1 x other" in failures([*OUTCOMES, Outcome(1, 0.0, error="other")])


def test_details_of_a_failed_request_are_its_error():
    kept = details(OUTCOMES)
    assert kept["errors"] == ["", "", "", "it broke"] and kept["ttfts"][3] is None and kept["itls"][3] == []
    assert kept["itls"][0] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:0", "ttft:x", ":5"])
def test_a_goodput_limit_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must look like ttft:500"):
        goodput_limit(text)
