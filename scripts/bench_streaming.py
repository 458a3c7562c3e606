"""What it costs to stream every token to many clients, over the same requests offline.

    python scripts/bench_streaming.py --num-clients 64 --repeat 5

A server and an `LLM` with the same flags (what follows after --), in two processes, take turns with fresh prompts: as
many requests as clients, all at once. The clients are in this process, so their work is part of the cost.
"""

import argparse
import asyncio
import random
import sys

import jax
from tqdm import tqdm

from jpaged import LLM
from jpaged.bench.client import CompletionClient, served_model, wait_until_ready
from jpaged.bench.http import HttpClient
from jpaged.bench.load import send_all
from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, spread, write_json
from jpaged.bench.server_process import ServerProcess
from jpaged.bench.throughput import measure
from jpaged.bench.workloads import BenchRequest
from jpaged.cli import add_flags, from_flags
from jpaged.config import EngineConfig

BAR = 0.95  # output tokens/s streamed over offline
READY_SECONDS = 600.0


async def stream(url: str, requests: list[BenchRequest]) -> float:
    """Output tokens/s of the requests sent at once. Raises RuntimeError where one fails."""
    http = HttpClient(url, {})
    await wait_until_ready(http, READY_SECONDS, lambda text: None)
    model, _ = await served_model(http, None)
    fields = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
    client = CompletionClient(http, "/v1/completions", fields, READY_SECONDS)
    outcomes, seconds = await send_all(client, requests, [0.0] * len(requests))
    if error := next((outcome.error for outcome in outcomes if outcome.error), None):
        raise RuntimeError(f"a request failed: {error}")
    return sum(request.output_len for request in requests) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-clients", type=int_from(1), default=64)
    parser.add_argument("--prompt-len", type=int_from(1), default=128)
    parser.add_argument("--output-len", type=int_from(1), default=128)
    parser.add_argument("--repeat", type=int_from(1), default=5)
    add_json_option(parser)
    parser.add_argument("engine_flags", nargs="*", metavar="ENGINE FLAG")
    args = parser.parse_args()
    engine_flags = argparse.ArgumentParser()
    add_flags(engine_flags, EngineConfig, "engine")
    ratios, rng = [], random.Random(0)
    try:
        llm = LLM(**vars(from_flags(EngineConfig, engine_flags.parse_args(args.engine_flags))))
        llm.warm_up()
        vocab_size = llm.engine.model_config.vocab_size
        with ServerProcess(args.engine_flags) as server:
            for number in tqdm(range(1 + args.repeat), desc="pairs", unit="pair", leave=False):
                prompts = [[rng.randrange(vocab_size) for _ in range(args.prompt_len)] for _ in range(args.num_clients)]
                requests = [BenchRequest(prompt, args.output_len) for prompt in prompts]
                turns = {
                    "offline": lambda: measure(llm, requests)["output_tokens_per_second"],
                    "streamed": lambda: asyncio.run(stream(server.url, requests)),
                }
                rates = {name: turns[name]() for name in (sorted(turns) if number % 2 else sorted(turns)[::-1])}
                if number:  # the first warms both up
                    ratios.append(rates["streamed"] / rates["offline"])
                    tqdm.write(f"{rates['streamed']:.1f} streamed, {rates['offline']:.1f} offline, output tokens/s")
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    sizes = f"{args.num_clients} clients, {args.prompt_len} + {args.output_len} tokens"
    print(f"{sizes}, jax {jax.__version__}, {load_note()}")
    print(f"streamed over offline: {spread(ratios, 3)} (bar {BAR})")
    write_json(args.json, {"streamed_over_offline": ratios})


if __name__ == "__main__":
    main()
