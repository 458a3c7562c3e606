"""EngineMetrics: the names that dashboards know, and numbers that add up."""

import timeit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jpaged.histogram import Histogram
from jpaged.levels import Levels
from jpaged.metrics import EngineMetrics
from jpaged.outputs import RequestMetrics
from jpaged.step_metrics import StepStats

NAMES = {
    "num_requests_running", "num_requests_waiting", "num_forks_to_come", "num_block_copies_to_come",
    "kv_cache_usage_perc", "kv_cache_sharing_ratio", "cache_config_info",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_swapped_out", "prompt_tokens", "generation_tokens",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "request_success", "admission_rejections", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "iteration_tokens_total", "xla_compiles", "padding_tokens", "host_gap_seconds",
}  # fmt: skip


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """name{labels but the model's} -> value, as a scraper reads them."""
    result = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels["model_name"] == "tiny"
            result[sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(labels.items()))] = sample.value
    return result


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("tiny")


@pytest.mark.parametrize("prefix", ["jpaged:", "vllm:"])
def test_every_metric_of_the_conventions_is_there(prefix):
    metrics = EngineMetrics("tiny", prefix)
    metrics.set_cache_config(block_size=16, num_blocks=100)
    families = {f.name for f in text_string_to_metric_families(metrics.render().decode())}
    assert families == {prefix + name for name in NAMES}


def test_steps_add_up_and_levels_follow_the_last(metrics):
    for num_running in (3, 2):
        metrics.on_step(
            StepStats(
                Levels(num_running, 1, num_forks=3, num_copies=2, kv_cache_usage=0.25, kv_cache_sharing=1.5),
                num_scheduled_tokens=10,
                num_padding_tokens=6,
                num_prompt_tokens=8,
                num_generation_tokens=2,
                num_preemptions=1,
                num_draft_tokens=8,
                num_accepted_tokens=5,
                prefix_cache_queries=8,
                prefix_cache_hits=4,
                host_gap_seconds=1e-4,
            )
        )
    read = samples(metrics)
    assert read["jpaged:num_requests_running"] == 2
    assert read["jpaged:num_requests_waiting"] == 1
    assert read["jpaged:num_forks_to_come"] == 3
    assert read["jpaged:num_block_copies_to_come"] == 2
    assert read["jpaged:kv_cache_usage_perc"] == 0.25
    assert read["jpaged:kv_cache_sharing_ratio"] == 1.5
    assert read["jpaged:prompt_tokens_total"] == 16
    assert read["jpaged:generation_tokens_total"] == 4
    assert read["jpaged:padding_tokens_total"] == 12
    assert read["jpaged:num_preemptions_total"] == 2
    assert read["jpaged:spec_decode_num_draft_tokens_total"] == 16
    assert read["jpaged:spec_decode_num_accepted_tokens_total"] == 10
    assert read["jpaged:prefix_cache_queries_total"] == 16
    assert read["jpaged:prefix_cache_hits_total"] == 8
    assert read["jpaged:iteration_tokens_total_count"] == 2
    assert read["jpaged:iteration_tokens_total_bucket{le=8.0}"] == 0
    assert read["jpaged:iteration_tokens_total_bucket{le=16.0}"] == 2
    assert read["jpaged:host_gap_seconds_sum"] == pytest.approx(2e-4)


def test_levels_can_change_between_steps(metrics):
    metrics.on_step(StepStats(Levels(num_running=1, kv_cache_usage=0.5)))
    metrics.levels = Levels()
    read = samples(metrics)
    assert read["jpaged:num_requests_running"] == read["jpaged:kv_cache_usage_perc"] == 0


def test_a_finished_request_is_timed_from_arrival_to_end(metrics):
    times = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.5, first_token_time=12.0, finished_time=14.0)
    metrics.on_finished(times, num_prompt_tokens=100, num_generation_tokens=5, finish_reason="stop")
    read = samples(metrics)
    sums = {
        "request_queue_time_seconds": 0.5, "request_prefill_time_seconds": 1.5, "time_to_first_token_seconds": 2.0,
        "request_decode_time_seconds": 2.0, "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 4.0, "request_prompt_tokens": 100, "request_generation_tokens": 5,
    }  # fmt: skip
    assert {name: read[f"jpaged:{name}_sum"] for name in sums} == pytest.approx(sums)
    assert read["jpaged:request_success_total{finished_reason=stop}"] == 1


def test_what_never_happened_to_a_request_is_not_observed(metrics):
    metrics.on_finished(RequestMetrics(arrival_time=1.0, finished_time=2.0), 7, 0, "abort")
    read = samples(metrics)
    assert read["jpaged:time_to_first_token_seconds_count"] == 0
    assert read["jpaged:request_queue_time_seconds_count"] == 0
    assert read["jpaged:e2e_request_latency_seconds_count"] == 1
    assert read["jpaged:request_success_total{finished_reason=abort}"] == 1


def test_labels_tell_rejections_and_compilations_apart(metrics):
    metrics.on_rejected("queue_full")
    metrics.on_compile("warmup")
    metrics.on_compile("warmup")
    metrics.on_compile("serving")
    read = samples(metrics)
    assert read["jpaged:admission_rejections_total{reason=queue_full}"] == 1
    assert read["jpaged:xla_compiles_total{phase=warmup}"] == 2
    assert read["jpaged:xla_compiles_total{phase=serving}"] == 1


def test_a_bulk_observation_equals_single_ones():
    bulk, single = Histogram((0.1, 1.0)), Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 2.0):
        bulk.observe(value, 3)
        for _ in range(3):
            single.observe(value)
    assert bulk.counts == single.counts == [3, 3, 3]
    assert bulk.total == pytest.approx(single.total)
    assert bulk.buckets() == [("0.1", 3.0), ("1.0", 6.0), ("+Inf", 9.0)]


def test_snapshot_says_what_a_scrape_says(metrics):
    metrics.on_step(StepStats(Levels(num_running=2), num_generation_tokens=2))
    metrics.on_inter_token_latency(0.02, 2)
    metrics.on_compile("warmup")
    snapshot, read = metrics.snapshot(), samples(metrics)
    assert snapshot["generation_tokens"] == read["jpaged:generation_tokens_total"] == 2
    assert snapshot["num_requests_running"] == read["jpaged:num_requests_running"] == 2
    assert snapshot["inter_token_latency_seconds_count"] == read["jpaged:inter_token_latency_seconds_count"] == 2
    assert snapshot["xla_compiles{phase=warmup}"] == read["jpaged:xla_compiles_total{phase=warmup}"] == 1


def test_two_engines_do_not_share_a_number():
    first, second = EngineMetrics("a"), EngineMetrics("b")
    first.on_step(StepStats(Levels(), num_generation_tokens=5))
    assert second.snapshot()["generation_tokens"] == 0


def test_a_step_of_256_requests_costs_microseconds(metrics):
    stats = StepStats(Levels(256), num_scheduled_tokens=256, num_generation_tokens=256, host_gap_seconds=1e-4)
    seconds = min(
        timeit.repeat(
            lambda: (metrics.on_step(stats), metrics.on_inter_token_latency(0.01, 256)), number=1000, repeat=5
        )
    )
    assert seconds / 1000 < 15e-6
