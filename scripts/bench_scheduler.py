"""What the host does for a step of decodes, without a model: scheduler, block accounting, batch building, and text.

    python scripts/bench_scheduler.py --num-seqs 32,256,1024

Milliseconds a step on one core, median and 99th percentile. Sequences start as they do in an engine, prefilled under
the token budget, so that they do not all need a new block in the same step. Prefix caching is on, as by default. Text,
detokenised and searched for a stop string, is told apart: a server makes it in another process.
"""

import argparse
import logging
import os
import random
import time

import numpy as np

from jpaged.batch import BatchBuilder
from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, write_json
from jpaged.cache_spec import CacheSpec
from jpaged.config import DEFAULT_MODEL, EngineConfig
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.metrics import EngineMetrics
from jpaged.output_processor import OutputProcessor
from jpaged.result_processor import RequestState, ResultProcessor
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence
from jpaged.tokenizer import Tokenizer
from models.weights import open_checkpoint, resolve_model

BARS = {32: 0.2, 256: 1.0, 512: 2.0, 1024: 4.0}  # sequences that run: ms a step
MAX_MODEL_LEN = 8192  # SmolLM2's; the width of the block tables
VOCAB_SIZE = 49152
PARTS = ("schedule", "build", "update")  # that the bars are for; update ends with the token deltas


def run_decodes(
    num_seqs: int, prompt_len: int, num_steps: int, block_size: int, tokenizer: Tokenizer | None = None
) -> dict[str, list[float]]:
    """The seconds of each part of each of num_steps steps in which num_seqs sequences decode; text where there is a
    tokenizer."""
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(512, 2 * num_seqs), block_size=block_size)
    longest = prompt_len + 2 * num_seqs + num_steps  # the first ones decode while the last ones are prefilled
    spec = CacheSpec(
        num_blocks=num_seqs * -(-longest // block_size) + 1,
        block_size=block_size,
        max_model_len=max(MAX_MODEL_LEN, longest),
    )
    scheduler = Scheduler(config, KVCacheManager(spec))
    builder = BatchBuilder(config, spec, VOCAB_SIZE)
    rng = random.Random(0)
    params = SamplingParams(temperature=0.7, max_tokens=None, ignore_eos=True, stop="\n\n\nUser:")
    results, metrics, readers = ResultProcessor(scheduler), EngineMetrics("none"), {}
    for i in range(num_seqs):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]
        seq = Sequence(str(i), prompt, params, seed=i, max_tokens=longest)
        scheduler.add(seq)
        results.requests[str(i)] = RequestState([seq])
        if tokenizer is not None:
            readers[str(i)] = OutputProcessor(str(i), prompt_len, params, tokenizer, metrics, results.requests.pop)

    parts = (*PARTS, "text") if tokenizer is not None else PARTS
    times: dict[str, list[float]] = {part: [] for part in parts}
    token_ids = [[rng.randrange(VOCAB_SIZE)] for _ in range(num_seqs)]
    while len(times["update"]) < num_steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        builder.build(plan)
        built = time.perf_counter()
        appended = scheduler.update(plan, token_ids[: len(plan.sampled)])
        deltas = results.process(appended, None)  # whose log-probs nobody asked for
        updated = time.perf_counter()
        if tokenizer is not None:
            for delta in deltas:
                readers[delta.request_id].process(delta)
        done = time.perf_counter()
        if plan.num_decodes == num_seqs:
            for part, seconds in zip(parts, (scheduled - start, built - scheduled, updated - built, done - updated)):
                times[part].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", default="32,256", help="how many sequences run; several, separated by commas")
    parser.add_argument("--prompt-len", type=int_from(1), default=200)
    parser.add_argument("--steps", type=int_from(1), default=500)
    parser.add_argument("--block-size", type=int_from(1), default=16)
    add_json_option(parser)
    args = parser.parse_args()
    try:
        sizes = [int_from(1)(size) for size in args.num_seqs.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--num-seqs: {error}")
    logging.disable(logging.WARNING)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    print(f"ms a step: median (99th percentile); {load_note()}")
    columns = (*PARTS, "together", "text")
    print(f"{'running':>8}" + "".join(f"{part:>18}" for part in columns))
    tokenizer, numbers = Tokenizer.from_checkpoint(open_checkpoint(resolve_model(DEFAULT_MODEL))), {}
    for size in sizes:
        times = run_decodes(size, args.prompt_len, args.steps, args.block_size, tokenizer)
        times["together"] = [sum(parts) for parts in zip(*(times[part] for part in PARTS))]
        row = {part: 1e3 * np.percentile(times[part], (50, 99)) for part in columns}
        numbers[size] = {part: {"median_ms": middle, "p99_ms": high} for part, (middle, high) in row.items()}
        bar = f"   bar {BARS[size]}" if size in BARS else ""
        print(f"{size:>8}" + "".join(f"{f'{middle:.3f} ({high:.3f})':>18}" for middle, high in row.values()) + bar)
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
