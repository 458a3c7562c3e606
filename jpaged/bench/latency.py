"""`latency`: how long one batch takes from its prompts to its last token, over and over.

python -m jpaged.bench latency --batch-size 8 --input-len 32 --output-len 128
"""

import argparse
import time

import numpy as np
from tqdm import tqdm

import jpaged
from jpaged.bench.offline import make_llm, num_compiled, warn_if_compiled
from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, write_json
from jpaged.cli import add_flags as add_config_flags
from jpaged.config import EngineConfig

SUMMARY = "offline: seconds from start to end of one batch of equal requests"
PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument("--batch-size", type=int_from(1), default=8, help="default: %(default)s")
    group.add_argument("--input-len", type=int_from(1), default=32, help="default: %(default)s")
    group.add_argument("--output-len", type=int_from(1), default=128, help="default: %(default)s")
    group.add_argument(
        "--num-iters-warmup", type=int_from(0), default=2, help="batches that do not count (default: %(default)s)"
    )
    group.add_argument("--num-iters", type=int_from(1), default=10, help="batches that count (default: %(default)s)")
    add_json_option(parser)
    add_config_flags(parser, EngineConfig, "engine (--seed is the prompts' too)")


def run(args: argparse.Namespace) -> int:
    """Raises ValueError or OSError for what cannot work."""
    llm = make_llm(args)
    rng = np.random.default_rng(getattr(args, "seed", 0))
    shape = args.batch_size, args.input_len, args.output_len
    for _ in tqdm(range(args.num_iters_warmup), desc="warming up", unit="batch", leave=False):
        run_batch(llm, *shape, rng)
    before = num_compiled(llm)
    bar = tqdm(range(args.num_iters), desc="measuring", unit="batch", leave=False)
    latencies = [run_batch(llm, *shape, rng) for _ in bar]
    warn_if_compiled(llm, before)
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    print(f"{args.num_iters} x {args.batch_size} x ({args.input_len} + {args.output_len}); {load_note()}")
    print(f"Avg latency: {np.mean(latencies)} seconds")
    for percent, seconds in percentiles.items():
        print(f"{percent}% percentile latency: {seconds} seconds")
    write_json(
        args.json, {"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": percentiles}
    )
    return 0


def run_batch(llm: "jpaged.LLM", batch_size: int, input_len: int, output_len: int, rng: np.random.Generator) -> float:
    """Seconds of a batch of fresh random prompts: none is in the prefix cache."""
    prompts = rng.integers(llm.engine.model_config.vocab_size, size=(batch_size, input_len)).tolist()
    params = jpaged.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start
