"""Makes jpaged/bench/sharegpt_like.csv: request lengths with ShareGPT's published quantiles.

    python scripts/make_synthetic_trace.py

Nothing is copied of the data: a length is a point of the curve through the published quantiles (inverse transform
sampling), with one free exponent a column, so that the published mean comes out as well. Which input goes with which
output is drawn, under the data's own condition that both together are at most 2048 tokens.
"""

import argparse
import bisect
import csv
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jpaged.bench.options import int_from
from jpaged.bench.traces import SHAREGPT_LIKE

# ShareGPT in OPT tokens, first turns, input + output <= 2048: the trace of the PagedAttention paper (its figure 11a).
PUBLISHED = {
    "input": {"mean": 161.31, "p50": 35, "p90": 507, "p99": 1464, "max": 2028},
    "output": {"mean": 337.99, "p50": 271, "p90": 754, "p99": 1280, "max": 2009},
}
MAX_TOTAL = 2048


def describe(values: Sequence[int]) -> dict[str, float]:
    """The quantities by which the data's own SOURCE.txt describes lengths."""
    quantiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(values), **quantiles, "max": max(values)}


def length_at(u: float, published: dict[str, float], exponent: float) -> float:
    """The length that a part u of all requests does not exceed, 0 <= u <= 1.

    Between two quantiles the length grows as a power of the way, on a logarithmic scale.
    """
    parts = 0.0, 0.5, 0.9, 0.99, 1.0
    values = 1, published["p50"], published["p90"], published["p99"], published["max"]
    i = min(max(bisect.bisect_left(parts, u) - 1, 0), len(parts) - 2)
    way = (u - parts[i]) / (parts[i + 1] - parts[i])
    return values[i] * (values[i + 1] / values[i]) ** (way**exponent)


def draw(published: dict[str, float], num_rows: int) -> list[int]:
    """num_rows lengths in ascending order, evenly spaced in u, with the exponent that gives the published mean."""
    low, high = 0.2, 5.0  # the mean falls as the exponent grows
    for _ in range(60):
        exponent = (low + high) / 2
        lengths = [round(length_at((i + 1) / num_rows, published, exponent)) for i in range(num_rows)]
        low, high = (exponent, high) if statistics.fmean(lengths) > published["mean"] else (low, exponent)
    return lengths


def pair(inputs: list[int], outputs: list[int], seed: int) -> list[tuple[int, int]]:
    """Inputs and outputs in random order; those that are too long together swap outputs until none is."""
    rng = random.Random(seed)
    inputs, outputs = rng.sample(inputs, len(inputs)), rng.sample(outputs, len(outputs))
    while too_long := [i for i, lengths in enumerate(zip(inputs, outputs)) if sum(lengths) > MAX_TOTAL]:
        for i in too_long:
            j = rng.randrange(len(outputs))
            if max(inputs[i] + outputs[j], inputs[j] + outputs[i]) <= MAX_TOTAL:
                outputs[i], outputs[j] = outputs[j], outputs[i]
    return list(zip(inputs, outputs))


def make_trace(num_rows: int, seed: int) -> list[tuple[int, int]]:
    return pair(draw(PUBLISHED["input"], num_rows), draw(PUBLISHED["output"], num_rows), seed)


def quantile_table(trace: list[tuple[int, int]]) -> str:
    """The trace's quantiles above the published ones."""
    lines = [f"{'':30}{'mean':>10}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}"]
    for column, published in enumerate(PUBLISHED.items()):
        name, theirs = published
        for label, row in (
            (f"{name}, this trace", describe([r[column] for r in trace])),
            (f"{name}, ShareGPT", theirs),
        ):
            lines.append(
                f"{label:30}{row['mean']:10.2f}" + "".join(f"{row[k]:8.0f}" for k in ("p50", "p90", "p99", "max"))
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rows", type=int_from(100), default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the pairing and the order")
    parser.add_argument("--output", type=Path, default=SHAREGPT_LIKE)
    args = parser.parse_args()
    trace = make_trace(args.num_rows, args.seed)
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("input_len", "output_len"))
        writer.writerows(trace)
    print(f"{len(trace)} rows in {args.output}\n{quantile_table(trace)}")


if __name__ == "__main__":
    main()
