"""The report of a serving run: numbers under vLLM's names, and the block that vLLM prints."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jpaged.bench.outcomes import Outcome

WIDTH = 50
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def metric_values(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Milliseconds by metric: one a request, but one a gap between chunks for itl; no tpot of a single token."""
    seconds = {
        "ttft": [outcome.ttft for outcome in outcomes],
        "tpot": [outcome.tpot for outcome in outcomes if outcome.tpot is not None],
        "itl": [itl for outcome in outcomes for itl in outcome.itls],
        "e2el": [outcome.e2e for outcome in outcomes],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def summarise(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
) -> dict[str, float | int | None]:
    """duration: of the whole run, in seconds. goodput: milliseconds by metric that a request must keep to be good.

    Failed requests count as failed and as nothing else. None stands for the metric of a run that has no value of it.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_input = sum(outcome.prompt_len for outcome in done)
    num_output = sum(outcome.num_output_tokens for outcome in done)
    numbers = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_send_delay_ms": 1e3 * max(outcome.delay for outcome in outcomes),
    }
    if goodput:
        numbers["request_goodput"] = sum(_is_good(outcome, goodput) for outcome in done) / duration
    for name, values in metric_values(done).items():
        numbers |= {
            f"mean_{name}_ms": float(np.mean(values)) if values else None,
            f"median_{name}_ms": float(np.median(values)) if values else None,
            f"std_{name}_ms": float(np.std(values)) if values else None,
        }
        for percent in percentiles:
            numbers[f"p{percent:g}_{name}_ms"] = float(np.percentile(values, percent)) if values else None
    return numbers


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """A single token has no time per output token to be too long."""
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2e}
    return all(1e3 * seconds[name] <= limit for name, limit in goodput.items())


def block(
    numbers: Mapping[str, float | int | None],
    percentiles: Sequence[float],
    request_rate: float | None = None,
    max_concurrency: int | None = None,
) -> str:
    """What vLLM prints, in its order and its columns; request_rate is None for the arrivals of a trace."""
    has_rate = request_rate is not None and math.isfinite(request_rate)
    rows = [
        ("Successful requests:", numbers["completed"]),
        ("Failed requests:", numbers["failed"]),
        *([("Maximum request concurrency:", max_concurrency)] if max_concurrency is not None else []),
        *([("Request rate configured (RPS):", request_rate)] if has_rate else []),
        ("Benchmark duration (s):", numbers["duration"]),
        ("Total input tokens:", numbers["total_input_tokens"]),
        ("Total generated tokens:", numbers["total_output_tokens"]),
        ("Request throughput (req/s):", numbers["request_throughput"]),
        *([("Request goodput (req/s):", numbers["request_goodput"])] if "request_goodput" in numbers else []),
        ("Output token throughput (tok/s):", numbers["output_throughput"]),
        ("Total Token throughput (tok/s):", numbers["total_token_throughput"]),
        ("Max delay of sending (ms):", numbers["max_send_delay_ms"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *(_row(*row) for row in rows)]
    for name, title in METRICS.items():
        lines.append(f"{title:-^{WIDTH}}")
        for label, key in (("Mean", "mean"), ("Median", "median"), *((f"P{p:g}", f"p{p:g}") for p in percentiles)):
            lines.append(_row(f"{label} {name.upper()} (ms):", numbers[f"{key}_{name}_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _row(label: str, value: float | int | None) -> str:
    shown = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def failures(outcomes: Sequence[Outcome]) -> str:
    """The first error and how many there were of each kind; empty where nothing failed."""
    failed = [(number, outcome.error) for number, outcome in enumerate(outcomes) if outcome.error is not None]
    if not failed:
        return ""
    number, error = failed[0]
    lines = [f"{len(failed)} of {len(outcomes)} requests failed; the first was request {number}: {error}"]
    kinds = Counter(error for _, error in failed)
    if len(kinds) > 1:
        lines += [f"  {count} x {kind}" for kind, count in kinds.most_common(5)]
    return "\n".join(lines)


def details(outcomes: Sequence[Outcome]) -> dict[str, list]:
    """Every request's own numbers under vLLM's names, in seconds; a failed request has an error and no times."""
    done = [outcome.error is None for outcome in outcomes]
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens for outcome in outcomes],
        "start_times": [outcome.sent for outcome in outcomes],
        "ttfts": [outcome.ttft if ok else None for outcome, ok in zip(outcomes, done)],
        "itls": [outcome.itls if ok else [] for outcome, ok in zip(outcomes, done)],
        "errors": [outcome.error or "" for outcome in outcomes],
    }


def goodput_limit(text: str) -> tuple[str, float]:
    """An argparse type: METRIC:MILLISECONDS."""
    name, colon, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = -1.0
    if name not in GOODPUT_METRICS or not colon or not value > 0:
        raise argparse.ArgumentTypeError(
            f"must look like ttft:500, with one of {', '.join(GOODPUT_METRICS)} and milliseconds over 0, got {text!r}"
        )
    return name, value
