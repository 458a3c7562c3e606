"""What the prefix cache costs where nothing is shared, and what it gives where requests begin alike.

    python scripts/bench_prefix_cache.py --repeat 5

Runs with the cache on and off take turns in one process, on two engines of the same programs. Cost: fresh random prompts,
not one hit. Gain: requests that share a prefix of 80 and of 341 tokens, one and five worked examples of a translation as
in the PagedAttention paper (section 6.4), which is in the cache beforehand. There the prompt tokens computed must be
fewer by exactly the shared full blocks; the script fails where they are not. The host's own share of the cost, hashing
and looking up, is timed without a model too: runs on a busy machine differ by more than the bar.
"""

import argparse
import random
import statistics
import sys
import time

import jax
from tqdm import tqdm

from jpaged import LLM, SamplingParams
from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, spread, write_json
from jpaged.cache_spec import CacheSpec
from jpaged.config import DEFAULT_MODEL
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sequence import Sequence

COST_BAR = 1.01  # seconds with the cache over seconds without, at 0 % hits
PAPER = {80: 1.67, 341: 3.58}  # throughput over Orca (Oracle)


def run(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[float, int]:
    """Seconds for all prompts at once, and how many of their tokens were computed."""
    metrics = llm.engine.metrics
    computed, generated = metrics.iteration_tokens.total, metrics.generation_tokens
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - begin
    num_decodes = metrics.generation_tokens - generated - len(prompts)  # a prompt's last chunk yields the first token
    return seconds, int(metrics.iteration_tokens.total - computed) - num_decodes


def host_cost(num_prompts: int, prompt_len: int, block_size: int) -> float:
    """Seconds a prompt that hashing, looking up and inserting take."""
    blocks = -(-prompt_len // block_size)
    spec = CacheSpec(num_blocks=num_prompts * blocks + 1, block_size=block_size, max_model_len=prompt_len + 1)
    rng, seconds = random.Random(0), {}
    prompts = [[rng.randrange(49152) for _ in range(prompt_len)] for _ in range(num_prompts)]
    for enabled in (True, False):
        kv = KVCacheManager(spec, enable_prefix_caching=enabled)
        sequences = [Sequence(str(i), ids, SamplingParams(), seed=i, max_tokens=1) for i, ids in enumerate(prompts)]
        begin = time.perf_counter()
        for seq in sequences:
            kv.admit(seq, kv.match_prefix(seq), prompt_len)
            kv.mark_computed(seq, 0, prompt_len)
        seconds[enabled] = time.perf_counter() - begin
    return (seconds[True] - seconds[False]) / num_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--num-requests", type=int_from(1), default=16)
    parser.add_argument("--prompt-len", type=int_from(1), default=128, help="of the prompts that share nothing")
    parser.add_argument("--own-len", type=int_from(1), default=30, help="tokens of a prompt after the shared prefix")
    parser.add_argument("--output-len", type=int_from(1), default=30)
    parser.add_argument("--block-size", type=int_from(1), default=16)
    parser.add_argument("--repeat", type=int_from(1), default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_json_option(parser)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    try:
        options = {"model": args.model, "block_size": args.block_size, "kv_cache_memory_bytes": 512 << 20}
        cached, plain = LLM(**options), LLM(**options, enable_prefix_caching=False)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    vocab_size = cached.engine.model_config.vocab_size

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    def take_turns(make_prompts, name: str) -> dict[str, list]:
        """Seconds and computed prompt tokens of each run; the first of each engine compiles and is not counted."""
        results = {"on": [], "off": []}
        for number in tqdm(range(1 + args.repeat), desc=name, unit="pair", leave=False):
            prompts = make_prompts()
            pair = [("on", cached), ("off", plain)]
            for key, llm in pair if number % 2 else pair[::-1]:
                result = run(llm, prompts, args.output_len)
                if number:
                    results[key].append(result)
        return results

    def ratios(results) -> list[float]:
        return [off[0] / on[0] for on, off in zip(results["on"], results["off"])]

    print(f"{args.model}, block size {args.block_size}, jax {jax.__version__}, {load_note()}")
    cost = take_turns(lambda: [tokens(args.prompt_len) for _ in range(args.num_requests)], "nothing shared")
    cost_ratios = [1 / ratio for ratio in ratios(cost)]
    seconds = statistics.median(on[0] for on in cost["on"]) / args.num_requests
    host = host_cost(200, args.prompt_len, args.block_size)
    print(f"nothing shared: {args.num_requests} x ({args.prompt_len} + {args.output_len})")
    print(f"  seconds on over off       {spread(cost_ratios, 3)}   bar {COST_BAR}")
    print(f"  the host's share alone    {1e6 * host:.0f} us a prompt, {host / seconds:.3%} of the run")
    numbers = {"cost": {"ratios": cost_ratios, "host_us": 1e6 * host, "host_share": host / seconds}}
    for length, paper in PAPER.items():
        prefix = tokens(length)
        cached.generate([prefix], SamplingParams(max_tokens=1), use_tqdm=False)
        shared = length // args.block_size * args.block_size
        gain = take_turns(lambda: [prefix + tokens(args.own_len) for _ in range(args.num_requests)], f"{length} shared")
        computed = {key: {result[1] for result in results} for key, results in gain.items()}
        whole = args.num_requests * (length + args.own_len)
        expected = {"on": {whole - args.num_requests * shared}, "off": {whole}}
        print(f"{length} tokens shared: {args.num_requests} x ({length} + {args.own_len} + {args.output_len})")
        print(f"  prompt tokens computed    {max(computed['on'])} of {whole}: {shared} fewer a request")
        print(f"  throughput on over off    {spread(ratios(gain), 2)}   the paper, over Orca: {paper}")
        if computed != expected:
            sys.exit(f"error: {computed} prompt tokens were computed, expected {expected}")
        numbers[length] = {"ratios": ratios(gain), "computed": max(computed["on"]), "of": whole}
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
