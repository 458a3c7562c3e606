"""Which padded sizes the steps of a trace need: waste against the number of programs, for several ladders.

    python scripts/choose_buckets.py
    python scripts/choose_buckets.py --rates 0.5,2,8 --trace ../shared/data/sharegpt_paper/sharegpt_opt_lengths_le2048.csv.gz

The real scheduler replays the trace without a model: all requests at once, and as a Poisson stream of so many requests
a second (of a stated model of a step's time: a fixed part and a part a token). Each step's tokens and sampling rows
are then padded to each ladder. Padding is the part of the computed tokens that fill a bucket; each program costs
seconds of compiling. `best k` are the k sizes that pad this very trace least, by dynamic programming: the bound.
"""

import argparse
import logging
import random
import sys
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from make_synthetic_trace import MAX_TOTAL
from tqdm import tqdm

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import write_json
from jpaged.bench.traces import SHAREGPT_LIKE, read_lengths
from jpaged.buckets import Buckets
from jpaged.cache_spec import CacheSpec
from jpaged.config import MIN_TOKEN_BUCKET, EngineConfig
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence

BAR = 0.10  # of the computed tokens, on the ShareGPT-like trace
SECONDS_A_PROGRAM = 4.5  # compiling the default model's step on CPU
RATIOS = (1.25, 1.33, 1.5, 2)
BEST_SIZES = (8, 12, 16, 24)
ALL_AT_ONCE = float("inf")


@dataclass(frozen=True)
class StepTime:
    """A step's seconds, for a stream's clock: fixed, and for each token. The defaults are of SmolLM2-135M on 2 cores."""

    fixed: float = 0.012
    per_token: float = 0.0009


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds at which requests come: a Poisson process, or all at 0."""
    if rate == ALL_AT_ONCE:
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def replay(
    trace: list[tuple[int, int]], rate: float, config: EngineConfig, pool_tokens: int, step_time: StepTime
) -> Counter[tuple[int, int]]:
    """How many steps had so many (tokens, sampling rows)."""
    block_size = config.block_size_on("cpu")
    spec = CacheSpec(
        num_blocks=pool_tokens // block_size + 1, block_size=block_size, max_model_len=max(map(sum, trace))
    )
    if spec.num_usable_tokens < spec.max_model_len:
        raise ValueError(f"a request of {spec.max_model_len} tokens does not fit in a pool of {pool_tokens}")
    scheduler = Scheduler(config, KVCacheManager(spec, enable_prefix_caching=False))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    to_come = list(zip(arrivals(len(trace), rate), trace))[::-1]
    steps, now = Counter(), 0.0
    with tqdm(total=len(trace), desc=f"rate {rate:g}", unit="request", leave=False) as bar:
        while to_come or scheduler.has_work:
            if not scheduler.has_work:
                now = max(now, to_come[-1][0])
            while to_come and to_come[-1][0] <= now:
                _, (num_input, num_output) = to_come.pop()
                prompt = [0] * num_input
                scheduler.add(Sequence(str(len(to_come)), prompt, params, seed=0, max_tokens=num_output))
            plan = scheduler.schedule()
            steps[plan.num_tokens, len(plan.sampled)] += 1
            now += step_time.fixed + step_time.per_token * plan.num_tokens
            scheduler.update(plan, [[0]] * len(plan.sampled))
            bar.update(len(trace) - len(to_come) - len(scheduler.running) - len(scheduler.waiting) - bar.n)
    return steps


def padding(steps: Counter[tuple[int, int]], ladder: list[int]) -> float:
    """The part of all computed tokens that fill a bucket."""
    real = sum(tokens * count for (tokens, _), count in steps.items())
    computed = sum(ladder[bisect_left(ladder, tokens)] * count for (tokens, _), count in steps.items())
    return 1 - real / computed


def row_padding(steps: Counter[tuple[int, int]], buckets: Buckets) -> float:
    """The part of all sampling rows that fill a bucket."""
    real = sum(rows * count for (_, rows), count in steps.items())
    return 1 - real / sum(buckets.choose(*step)[1] * count for step, count in steps.items())


def geometric_ladder(largest: int, ratio: float) -> list[int]:
    """From the smallest size to largest, each at most ratio times the one before, or one more than it."""
    sizes = [MIN_TOKEN_BUCKET]
    while sizes[-1] < largest:
        sizes.append(min(max(sizes[-1] + 1, int(sizes[-1] * ratio)), largest))
    return sizes


def best_ladder(steps: Counter[tuple[int, int]], largest: int, num_sizes: int) -> list[int]:
    """The num_sizes sizes, largest among them, that pad these steps least.

    cost[j] is the least of computed tokens for all steps of at most sizes[j] tokens, with sizes[j] the last bucket.
    """
    counts = Counter({largest: 0, MIN_TOKEN_BUCKET: 0})
    for (tokens, _), count in steps.items():
        counts[max(tokens, MIN_TOKEN_BUCKET)] += count
    sizes = sorted(counts)
    below = [0]
    for size in sizes:
        below.append(below[-1] + counts[size])
    cost = [size * below[j + 1] for j, size in enumerate(sizes)]
    chosen = [[size] for size in sizes]
    for _ in range(min(num_sizes, len(sizes)) - 1):
        new_cost, new_chosen = cost[:], chosen[:]
        for j, size in enumerate(sizes):
            options = [(cost[i] + size * (below[j + 1] - below[i + 1]), i) for i in range(j)]
            least, i = min(options, default=(cost[j], None))
            if least < cost[j]:
                new_cost[j], new_chosen[j] = least, [*chosen[i], size]
        cost, chosen = new_cost, new_chosen
    return chosen[-1]


def ladders(steps: Counter[tuple[int, int]], config: EngineConfig) -> dict[str, list[int]]:
    """Those to compare, by name."""
    largest = config.max_num_batched_tokens
    current = Buckets(largest, config.max_num_seqs, config.token_buckets).tokens
    found = {"current": current}
    found |= {f"ratio {ratio:g}": geometric_ladder(largest, ratio) for ratio in RATIOS}
    found |= {f"best {count}": best_ladder(steps, largest, count) for count in (*BEST_SIZES, len(current))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=SHAREGPT_LIKE, help="a CSV of lengths (default: %(default)s)")
    parser.add_argument("--limit", type=int_from(1), default=1000, help="requests, the first of the trace")
    parser.add_argument(
        "--rates", default="inf,0.5,1,2", help="requests a second; inf: all at once (default: %(default)s)"
    )
    parser.add_argument(
        "--pool-tokens", type=int_from(1), default=46_000, help="slots in the pool (default: %(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int_from(1), default=256)
    parser.add_argument("--max-num-batched-tokens", type=int_from(2), default=512)
    parser.add_argument("--step-ms", default="12,0.9", help="of a step: fixed, and each token (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="also print the sizes of each ladder")
    add_json_option(parser)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    try:
        rates = [float(rate) for rate in args.rates.split(",")]
        step_time = StepTime(*(float(ms) / 1e3 for ms in args.step_ms.split(",")))
        config = EngineConfig(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens)
        trace = read_lengths(args.trace, MAX_TOTAL)[: args.limit]
        runs = {rate: replay(trace, rate, config, args.pool_tokens, step_time) for rate in rates}
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"error: {error}")
    numbers = {}
    for rate, steps in runs.items():
        mean = sum(tokens * count for (tokens, _), count in steps.items()) / steps.total()
        current = Buckets(config.max_num_batched_tokens, config.max_num_seqs)
        when = "all at once" if rate == ALL_AT_ONCE else f"{rate:g} requests/s"
        print(
            f"{when}: {steps.total()} steps of {mean:.1f} tokens; sampling rows of the current programs pad "
            f"{row_padding(steps, current):.1%}"
        )
        print(f"  {'ladder':12}{'sizes':>7}{'programs':>10}{'compile s':>11}{'padding':>9}   bar {BAR:.0%}")
        for name, ladder in ladders(steps, config).items():
            num_programs = len(Buckets(config.max_num_batched_tokens, config.max_num_seqs, tuple(ladder)).all())
            part = padding(steps, ladder)
            print(
                f"  {name:12}{len(ladder):>7}{num_programs:>10}{num_programs * SECONDS_A_PROGRAM:>11.0f}{f'{part:.1%}':>9}"
                + (f"   {ladder}" if args.show else "")
            )
            numbers[f"{rate:g} {name}"] = {"sizes": ladder, "programs": num_programs, "padding": part}
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
