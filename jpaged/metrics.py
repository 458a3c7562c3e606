"""EngineMetrics: what the engine counts, in the names of Prometheus dashboards that already exist."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jpaged.config import EngineConfig
from jpaged.histogram import Histogram
from jpaged.levels import Levels
from jpaged.outputs import RequestMetrics
from jpaged.step_metrics import StepStats

DEFAULT_PREFIX = "jpaged:"

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80
)  # fmt: skip
GAP_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 1)
REQUEST_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000
)  # fmt: skip
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class EngineMetrics:
    """Every metric of one engine, in a registry of its own.

    The engine calls on_step, and on_levels where they change between steps, as by an abort, from one thread; whoever
    reads a request calls on_inter_token_latency and on_finished, from any. generation_tokens are those that the engine
    has sampled; request_generation_tokens are those that requests were given, and a request's first comes when it is
    given out (of beams, at the end). What the engine has sampled and nobody was given: what came after a stop string
    or an abort, what beams sampled beyond the tokens of their results, and one token of each pinned prefix.
    Numbers are plain attributes that become Prometheus families only when someone asks: a step costs about two
    microseconds, whatever the number of requests. prefix may be changed at any time.
    """

    def __init__(self, model_name: str, prefix: str = DEFAULT_PREFIX):
        self.model_name = model_name
        self.prefix = prefix
        self.levels = Levels()
        self.cache_config: dict[str, str] = {}
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.num_swapped_out = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.padding_tokens = 0
        self.request_success: Counter[str] = Counter()
        self.admission_rejections: Counter[str] = Counter()
        self.xla_compiles: Counter[str] = Counter(warmup=0, serving=0)
        self.iteration_tokens = Histogram(STEP_TOKENS)
        self.host_gap = Histogram(GAP_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.time_to_first_token = Histogram(SECONDS)
        self.time_per_output_token = Histogram(TOKEN_SECONDS)
        self.e2e_latency = Histogram(SECONDS)
        self.queue_time = Histogram(SECONDS)
        self.prefill_time = Histogram(SECONDS)
        self.decode_time = Histogram(SECONDS)
        self.request_prompt_tokens = Histogram(REQUEST_TOKENS)
        self.request_generation_tokens = Histogram(REQUEST_TOKENS)
        self._lock = threading.Lock()  # for what several threads write
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Those of the engine that config describes, under the first name that its model is served by."""
        return cls((config.served_model_name or (config.model,))[0])

    def on_levels(self, levels: Levels) -> None:
        self.levels = levels

    def on_step(self, stats: StepStats) -> None:
        self.levels = stats.levels
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions
        self.num_swapped_out += stats.num_swapped_out
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens
        self.prompt_tokens += stats.num_prompt_tokens
        self.generation_tokens += stats.num_generation_tokens
        self.padding_tokens += stats.num_padding_tokens
        self.iteration_tokens.observe(stats.num_scheduled_tokens)
        self.host_gap.observe(stats.host_gap_seconds)

    def on_inter_token_latency(self, seconds: float, num_tokens: int = 1) -> None:
        """num_tokens tokens each came `seconds` after the one before in its request."""
        with self._lock:
            self.inter_token_latency.observe(seconds, num_tokens)

    def on_finished(
        self, metrics: RequestMetrics, num_prompt_tokens: int, num_generation_tokens: int, finish_reason: str
    ) -> None:
        """A request has ended in any way; what never happened (metrics' None) is not observed, and nothing of the time
        after the first token where all tokens came at once, as those of beams."""
        arrival, scheduled = metrics.arrival_time, metrics.first_scheduled_time
        first, finished = metrics.first_token_time, metrics.finished_time
        with self._lock:
            self.request_success[finish_reason] += 1
            self.request_prompt_tokens.observe(num_prompt_tokens)
            self.request_generation_tokens.observe(num_generation_tokens)
            if scheduled is not None:
                self.queue_time.observe(scheduled - arrival)
            if first is not None:
                self.time_to_first_token.observe(first - arrival)
                if scheduled is not None:
                    self.prefill_time.observe(first - scheduled)
            if finished is not None:
                self.e2e_latency.observe(finished - arrival)
            if first is not None and finished is not None and finished > first:
                self.decode_time.observe(finished - first)
                if num_generation_tokens > 1:
                    self.time_per_output_token.observe((finished - first) / (num_generation_tokens - 1))

    def on_rejected(self, reason: str) -> None:
        """A request was turned away before it became one ("queue_full", "invalid", ...)."""
        with self._lock:
            self.admission_rejections[reason] += 1

    def on_compile(self, phase: str) -> None:
        """XLA compiled a program, in phase "warmup" or "serving" (somebody waited for it)."""
        with self._lock:
            self.xla_compiles[phase] += 1

    def set_cache_config(self, **config: object) -> None:
        """The facts of the pool (block_size, num_blocks, ...), exported as labels of cache_config_info."""
        self.cache_config = {name: str(value) for name, value in config.items()}

    def render(self) -> bytes:
        """The Prometheus text exposition (format 0.0.4)."""
        return generate_latest(self._registry)

    def snapshot(self) -> dict[str, float]:
        """Every number by name, without the prefix.

        A label is part of the name, name{label=value}; a histogram becomes name_sum and name_count.
        """
        result = {name: float(value) for name, _, value in self._gauges()}
        result |= {name: float(value) for name, _, value in self._counters()}
        for name, _, label, counts in self._labelled():
            result |= {f"{name}{{{label}={key}}}": float(value) for key, value in counts.items()}
        for name, _, histogram in self._histograms():
            result[f"{name}_sum"] = histogram.total
            result[f"{name}_count"] = float(histogram.count)
        return result

    def collect(self) -> Iterator[Metric]:
        """The collector protocol of prometheus_client: runs at every scrape."""
        names, values = ["model_name"], [self.model_name]
        for name, help, value in self._gauges():
            family = GaugeMetricFamily(self.prefix + name, help, labels=names)
            family.add_metric(values, value)
            yield family
        if self.cache_config:
            family = GaugeMetricFamily(
                self.prefix + "cache_config_info", "The KV pool", labels=[*names, *self.cache_config]
            )
            family.add_metric([*values, *self.cache_config.values()], 1)
            yield family
        for name, help, value in self._counters():
            family = CounterMetricFamily(self.prefix + name, help, labels=names)
            family.add_metric(values, value)
            yield family
        for name, help, label, counts in self._labelled():
            family = CounterMetricFamily(self.prefix + name, help, labels=[*names, label])
            for key, value in counts.items():
                family.add_metric([*values, key], value)
            yield family
        for name, help, histogram in self._histograms():
            family = HistogramMetricFamily(self.prefix + name, help, labels=names)
            family.add_metric(values, histogram.buckets(), histogram.total)
            yield family

    def _gauges(self) -> Iterable[tuple[str, str, float]]:
        levels = self.levels
        return (
            ("num_requests_running", "Requests that run", levels.num_running),
            ("num_requests_waiting", "Requests that wait for room", levels.num_waiting),
            ("num_forks_to_come", "Samples of running requests that have not started yet", levels.num_forks),
            ("num_block_copies_to_come", "Blocks to be copied before the next step", levels.num_copies),
            ("kv_cache_usage_perc", "Used part of the KV pool, 0 to 1", levels.kv_cache_usage),
            ("kv_cache_sharing_ratio", "Logical over physical blocks in use, from 1", levels.kv_cache_sharing),
        )

    def _counters(self) -> Iterable[tuple[str, str, float]]:
        return (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", self.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache", self.prefix_cache_hits),
            ("num_preemptions", "Requests preempted for want of blocks", self.num_preemptions),
            ("num_swapped_out", "Preempted requests whose blocks went to host memory", self.num_swapped_out),
            ("spec_decode_num_draft_tokens", "Tokens drafted ahead and verified", self.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were right", self.num_accepted_tokens),
            ("prompt_tokens", "Prompt tokens computed", self.prompt_tokens),
            (
                "generation_tokens",
                "Tokens sampled, those included that no request is given: after a stop string or an abort, of beams that "
                "were given up, and one of each pinned prefix. Drafts count as far as they were right",
                self.generation_tokens,
            ),
            ("padding_tokens", "Tokens computed only to fill a bucket", self.padding_tokens),
        )

    def _labelled(self) -> Iterable[tuple[str, str, str, dict[str, int]]]:
        with self._lock:
            rejections, compiles = dict(self.admission_rejections), dict(self.xla_compiles)
        return (
            ("request_success", "Requests that ended, by reason", "finished_reason", self.request_success.copy()),
            ("admission_rejections", "Requests turned away, by reason", "reason", rejections),
            ("xla_compiles", "Programs compiled, at warm-up or while somebody waited", "phase", compiles),
        )

    def _histograms(self) -> Iterable[tuple[str, str, Histogram]]:
        return (
            ("iteration_tokens_total", "Tokens in a step", self.iteration_tokens),
            ("host_gap_seconds", "How long the device waited for the host before a step", self.host_gap),
            ("time_to_first_token_seconds", "From arrival to the first token", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request", self.inter_token_latency),
            ("request_time_per_output_token_seconds", "Between a request's tokens, mean", self.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the end", self.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first step", self.queue_time),
            ("request_prefill_time_seconds", "From the first step to the first token", self.prefill_time),
            ("request_decode_time_seconds", "From the first token to the end", self.decode_time),
            ("request_prompt_tokens", "Prompt tokens of a request", self.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Tokens given to a request, up to the end of its stop string; its best_of samples that were dropped included",
                self.request_generation_tokens,
            ),
        )
