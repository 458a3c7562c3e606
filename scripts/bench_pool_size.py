"""Whether a step's time depends on the size of the KV pool, and what the compiled step does to the pool.

    python scripts/bench_pool_size.py

Two engines that differ only in their number of blocks compute the same decode steps in turn. The blocks that they use
lie scattered over the whole pool. A step that copied the pool would show it in its time, in `alias` (the part of the
pool that the step writes in place) and in `temp`.
"""

import argparse
import random
import statistics
import sys
import time

import jax
from tqdm import tqdm

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, spread, write_json
from jpaged.block_pool import BlockPool
from jpaged.config import DEFAULT_MODEL, EngineConfig
from jpaged.engine import LLMEngine
from jpaged.sampling_params import SamplingParams

WARM_UP_STEPS = 3


def scatter(pool: BlockPool) -> None:
    """Shuffles the free queue of an unused pool."""
    blocks = [pool.pop_free() for _ in range(pool.num_free)]
    random.Random(0).shuffle(blocks)
    pool.release(blocks)


def make_engine(args: argparse.Namespace, num_blocks: int) -> LLMEngine:
    """An engine with all requests prefilled. Raises ValueError where the pool does not hold them to their end."""
    budget = max(2 * args.num_requests, 512)
    # While the last prompts are prefilled, the first requests decode already.
    num_prefills = -(-args.num_requests * args.prompt_len // (budget - args.num_requests)) + 1
    max_model_len = args.prompt_len + num_prefills + WARM_UP_STEPS + args.steps + 1
    config = EngineConfig(
        model=args.model,
        num_blocks_override=num_blocks,
        block_size=args.block_size,
        max_model_len=max_model_len,
        max_num_seqs=args.num_requests,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    engine = LLMEngine(config)
    needed = args.num_requests * engine.spec.max_blocks_per_seq
    if needed > engine.spec.num_usable_blocks:
        raise ValueError(
            f"{args.num_requests} requests of {max_model_len} tokens need {needed} blocks, and {num_blocks} has "
            f"{engine.spec.num_usable_blocks}"
        )
    scatter(engine.kv.pool)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for i in range(args.num_requests):
        prompt = [rng.randrange(engine.model_config.vocab_size) for _ in range(args.prompt_len)]
        engine.add_request(str(i), prompt, params)
    while any(seq.num_output_tokens == 0 for seq in engine.scheduler.sequences):
        engine.step()
    return engine


def measure_memory(engine: LLMEngine, num_requests: int) -> dict[str, int] | None:
    """Bytes of the compiled decode step; None where this backend does not tell."""
    program = engine.runner.programs[engine.runner.buckets.choose(num_requests, num_requests)]
    try:
        analysis = program.memory_analysis()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None
    if analysis is None:
        return None
    return {
        "pool": engine.runner.memory.pool,
        "alias": analysis.alias_size_in_bytes,
        "temp": analysis.temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--num-blocks", type=int_from(2), nargs=2, default=(512, 8192), metavar=("SMALL", "LARGE"))
    parser.add_argument("--num-requests", type=int_from(1), default=32)
    parser.add_argument("--prompt-len", type=int_from(1), default=128)
    parser.add_argument("--block-size", type=int_from(1), default=16)
    parser.add_argument("--steps", type=int_from(2), default=60, help="timed decode steps of each engine")
    add_json_option(parser)
    args = parser.parse_args()
    numbers = {}
    try:
        engines = {num_blocks: make_engine(args, num_blocks) for num_blocks in args.num_blocks}
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    times: dict[int, list[float]] = {num_blocks: [] for num_blocks in engines}
    for number in tqdm(range(WARM_UP_STEPS + args.steps), desc="decoding", unit="step", leave=False):
        for num_blocks, engine in engines.items():
            start = time.perf_counter()
            num_decoded = len(engine.step())
            assert num_decoded == args.num_requests, f"{num_decoded} of {args.num_requests} decoded"
            if number >= WARM_UP_STEPS:
                times[num_blocks].append(1e3 * (time.perf_counter() - start))

    print(f"{args.num_requests} decodes, block size {args.block_size}, {load_note()}")
    for num_blocks, engine in engines.items():
        print(f"  {num_blocks:>6} blocks   a step {spread(times[num_blocks], 2)} ms", end="")
        memory = measure_memory(engine, args.num_requests)
        if memory is None:
            print("   (this program does not tell its memory)")
        else:
            print("   " + ", ".join(f"{name} {size:,}" for name, size in memory.items()) + " bytes")
        numbers[num_blocks] = {"step_ms": times[num_blocks], "memory": memory}
    small, large = (times[num_blocks] for num_blocks in engines)
    ratios = [b / a for a, b in zip(small, large)]  # of neighbours in time: the machine's mood cancels
    numbers["ratio_of_medians"] = statistics.median(large) / statistics.median(small)
    numbers["median_ratio"] = statistics.median(ratios)
    print(
        f"  large over small: the medians {numbers['ratio_of_medians']:.3f}, step by step {numbers['median_ratio']:.3f}"
        "   bar 1, within noise"
    )
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
