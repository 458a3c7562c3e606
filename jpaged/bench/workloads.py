"""Workloads: what is asked for. Lengths from a distribution or a trace, prompts of random tokens, shared prefixes."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.bench.options import fraction, int_from
from jpaged.bench.traces import SHAREGPT_LIKE, TraceRow, read_trace

NUM_PROMPTS = 100


@dataclass(frozen=True)
class BenchRequest:
    """timestamp: the trace's own, in seconds; None where there is none. text: the prompt's, where that is sent."""

    prompt: list[int]
    output_len: int
    timestamp: float | None = None
    text: str | None = None


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt-like"),
        default="random",
        help="where lengths come from: --random-*, or 2000 pairs with ShareGPT's quantiles (default: %(default)s)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths from a CSV (or .csv.gz) instead: columns input and output, and arrival where it has one",
    )
    group.add_argument(
        "--num-prompts",
        type=int_from(1),
        default=None,
        help=f"requests (default: {NUM_PROMPTS}, or the trace where that has fewer)",
    )
    group.add_argument("--random-input-len", "--input-len", type=int_from(1), default=1024, help="default: %(default)s")
    group.add_argument(
        "--random-output-len", "--output-len", type=int_from(1), default=128, help="default: %(default)s"
    )
    group.add_argument(
        "--random-range-ratio",
        type=fraction,
        default=0.0,
        help="lengths are drawn from [len * (1 - ratio), len * (1 + ratio)] (default: %(default)s)",
    )
    group.add_argument("--prefix-len", type=int_from(0), default=0, help="tokens of a shared prefix before each prompt")
    group.add_argument("--num-prefixes", type=int_from(1), default=1, help="different prefixes (default: %(default)s)")
    group.add_argument(
        "--max-total-len", type=int_from(2), help="leave out requests of a dataset with more input and output together"
    )


class Workload:
    """The lengths of the requests, drawn once, and prompts for them that are fresh at each call.

    So that every rate of a sweep gets the same requests, and none finds the prompts of the one before in the prefix
    cache. Raises ValueError or OSError for a trace that cannot be read.
    """

    def __init__(self, args: argparse.Namespace, seed: int):
        self._seed = seed
        self._num_drawn = 0
        self._prefix_len, self._num_prefixes = args.prefix_len, args.num_prefixes
        rng = np.random.default_rng([seed, 0])
        if args.trace is not None:
            self.rows = first_rows(read_trace(args.trace, args.max_total_len), args.num_prompts)
        elif args.dataset_name == "sharegpt-like":
            rows = read_trace(SHAREGPT_LIKE, args.max_total_len)
            self.rows = sample_rows(rows, args.num_prompts or NUM_PROMPTS, rng)
        else:
            lengths = (args.random_input_len, args.random_output_len)
            self.rows = random_rows(args.num_prompts or NUM_PROMPTS, *lengths, args.random_range_ratio, rng)

    @property
    def has_timestamps(self) -> bool:
        return self.rows[0].arrival is not None

    @property
    def description(self) -> str:
        num_input = sum(row.input_len + self._prefix_len for row in self.rows)
        num_output = sum(row.output_len for row in self.rows)
        prefix = f" with {self._num_prefixes} shared prefixes of {self._prefix_len}" if self._prefix_len else ""
        return f"{len(self.rows)} requests: {num_input} tokens in{prefix}, {num_output} out"

    def requests(self, vocab_size: int, limit: int | None = None) -> list[BenchRequest]:
        """Random tokens below vocab_size; only the first `limit` requests where that is given."""
        self._num_drawn += 1
        rng = np.random.default_rng([self._seed, self._num_drawn])
        prefixes = rng.integers(vocab_size, size=(self._num_prefixes, self._prefix_len)).tolist()
        chosen = rng.permutation(np.arange(len(self.rows)) % self._num_prefixes)  # each as often as the others
        return [
            BenchRequest(
                prefixes[prefix] + rng.integers(vocab_size, size=row.input_len).tolist(), row.output_len, row.arrival
            )
            for row, prefix in list(zip(self.rows, chosen))[:limit]
        ]


def random_rows(
    num_requests: int, input_len: int, output_len: int, range_ratio: float, rng: np.random.Generator
) -> list[TraceRow]:
    """Both lengths uniform around their middle; range_ratio 0 makes them all equal."""
    columns = []
    for middle in (input_len, output_len):
        low, high = math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))
        columns.append(rng.integers(max(low, 1), high, size=num_requests, endpoint=True).tolist())
    return [TraceRow(*pair) for pair in zip(*columns)]


def sample_rows(rows: Sequence[TraceRow], num_requests: int, rng: np.random.Generator) -> list[TraceRow]:
    """At random; a row comes twice only where there are too few."""
    return [rows[i] for i in rng.choice(len(rows), num_requests, replace=num_requests > len(rows))]


def first_rows(rows: Sequence[TraceRow], num_requests: int | None) -> list[TraceRow]:
    """In order, for their arrivals' sake. Raises ValueError where more are asked for than there are."""
    if num_requests is not None and num_requests > len(rows):
        raise ValueError(f"the trace holds {len(rows)} requests that can be used, and --num-prompts is {num_requests}")
    return list(rows[: num_requests or NUM_PROMPTS])
