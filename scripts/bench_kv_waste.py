"""How much of the KV pool's allocated memory holds nothing: the real scheduler and block accounting, without a model.

    python scripts/bench_kv_waste.py
    python scripts/bench_kv_waste.py --trace ../shared/data/sharegpt_paper/sharegpt_opt_lengths_le2048.csv.gz

All requests of the trace wait from the start, and as many run as the pool holds. In each step the slots of all
allocated blocks are compared with the tokens that they hold; the share without a token is averaged over the steps.
Prefix caching is off, so that no block holds the tokens of two requests.
"""

import argparse
import logging
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from make_synthetic_trace import MAX_TOTAL, describe, quantile_table
from tqdm import tqdm

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import write_json
from jpaged.bench.traces import SHAREGPT_LIKE, read_lengths
from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence

BAR, BAR_BLOCK_SIZE, PAPER = 0.04, 16, 0.037  # the paper: https://arxiv.org/abs/2309.06180, figure 2


@dataclass
class Waste:
    """shares: the unused part of the allocated slots in each step."""

    shares: list[float]
    num_running: list[int]
    num_preemptions: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.shares)


def unused_share(kv: KVCacheManager, running: list[Sequence]) -> float:
    """The part of the allocated slots that hold no token during a step: one being written counts as used."""
    num_held = sum(seq.num_computed_tokens for seq in running)  # counted from when it is scheduled
    return 1 - num_held / (kv.pool.num_used * kv.block_size)


def run_trace(
    trace: list[tuple[int, int]], *, block_size: int, pool_tokens: int, max_num_seqs: int, max_num_batched_tokens: int
) -> Waste:
    """Runs every request to its end. Raises ValueError for one that the pool cannot hold."""
    spec = CacheSpec(
        num_blocks=pool_tokens // block_size + 1, block_size=block_size, max_model_len=max(map(sum, trace))
    )
    if spec.num_usable_tokens < spec.max_model_len:
        raise ValueError(
            f"a request of {spec.max_model_len} tokens does not fit in a pool of {spec.num_usable_tokens}: "
            "raise --pool-tokens"
        )
    config = EngineConfig(
        block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    kv = KVCacheManager(spec, enable_prefix_caching=False)
    scheduler = Scheduler(config, kv)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for i, (num_input, num_output) in enumerate(trace):
        scheduler.add(Sequence(str(i), [0] * num_input, params, seed=0, max_tokens=num_output))
    waste = Waste([], [], 0)
    with tqdm(total=len(trace), desc=f"block size {block_size}", unit="request", leave=False) as bar:
        while scheduler.has_work:
            plan = scheduler.schedule()
            waste.shares.append(unused_share(kv, scheduler.running))
            waste.num_running.append(len(scheduler.running))
            scheduler.update(plan, [[0]] * len(plan.sampled))
            bar.update(waste.num_running[-1] - len(scheduler.running))
    waste.num_preemptions = scheduler.num_preemptions
    return waste


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, default=SHAREGPT_LIKE, help="a CSV of input and output lengths (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=int_from(1), default=4000, help="requests, drawn at random where the trace has more"
    )
    parser.add_argument("--block-sizes", default="16,32,64", help="default: %(default)s")
    parser.add_argument(
        "--pool-tokens", type=int_from(1), default=46_000, help="slots in the pool (default: %(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int_from(1), default=256)
    parser.add_argument("--max-num-batched-tokens", type=int_from(1), default=512)
    add_json_option(parser)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # preemptions are counted here
    try:
        sizes = [int_from(1)(size) for size in args.block_sizes.split(",")]
        trace = read_lengths(args.trace, MAX_TOTAL)
    except (ValueError, OSError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    print(f"{len(trace)} requests in {args.trace}\n{quantile_table(trace)}\n")
    if len(trace) > args.limit:
        trace = random.Random(0).sample(trace, args.limit)
        means = (describe(column)["mean"] for column in zip(*trace))
        print(f"of them {args.limit} at random, of mean lengths {' and '.join(f'{mean:.1f}' for mean in means)}\n")

    print(f"a pool of {args.pool_tokens:,} slots, at most {args.max_num_seqs} sequences")
    print(f"{'block size':>10}{'unused':>10}{'bar':>8}{'paper':>8}{'running':>10}{'steps':>8}{'preempted':>11}")
    numbers = {}
    for size in sizes:
        try:
            waste = run_trace(
                trace,
                block_size=size,
                pool_tokens=args.pool_tokens,
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
            )
        except ValueError as error:
            sys.exit(f"error: {error}")
        running = statistics.fmean(waste.num_running)
        compared = f"{f'{BAR:.0%}':>8}{f'{PAPER:.1%}':>8}" if size == BAR_BLOCK_SIZE else f"{'':16}"
        print(
            f"{size:>10}{f'{waste.mean:.2%}':>10}{compared}{running:>10.1f}{len(waste.shares):>8}{waste.num_preemptions:>11}"
        )
        numbers[size] = {
            "unused": waste.mean, "mean_running": running, "steps": len(waste.shares), "preemptions": waste.num_preemptions
        }  # fmt: skip
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
