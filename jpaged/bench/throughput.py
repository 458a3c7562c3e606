"""`throughput`: requests and tokens a second of the engine alone, with all requests there from the start.

python -m jpaged.bench throughput --num-prompts 32 --input-len 128 --output-len 128
python -m jpaged.bench throughput --dataset-name sharegpt-like --max-num-seqs 64
"""

import argparse
import time

import jpaged
from jpaged.bench.offline import make_llm, num_compiled, warn_if_compiled
from jpaged.bench.options import add_json_option
from jpaged.bench.results import load_note, write_json
from jpaged.bench.workloads import BenchRequest, Workload, add_workload_flags
from jpaged.cli import add_flags as add_config_flags
from jpaged.config import EngineConfig

SUMMARY = "offline: requests/s and tokens/s with all requests there from the start"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser)
    add_json_option(parser)
    add_config_flags(parser, EngineConfig, "engine (--seed is the workload's too)")


def run(args: argparse.Namespace) -> int:
    """Raises ValueError or OSError for what cannot work."""
    workload = Workload(args, getattr(args, "seed", 0))
    llm = make_llm(args)
    llm.warm_up()
    before = num_compiled(llm)
    numbers = measure(llm, workload.requests(llm.engine.model_config.vocab_size))
    warn_if_compiled(llm, before)
    print(f"{workload.description}; {load_note()}")
    print(
        f"Throughput: {numbers['requests_per_second']:.2f} requests/s, "
        f"{numbers['tokens_per_second']:.2f} total tokens/s, "
        f"{numbers['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {numbers['total_input_tokens']}")
    print(f"Total num output tokens:  {numbers['total_output_tokens']}")
    write_json(args.json, numbers)
    return 0


def measure(llm: "jpaged.LLM", requests: list[BenchRequest]) -> dict[str, float]:
    """Greedy, to the length that each request names. Names as in vLLM."""
    params = [
        jpaged.SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True) for request in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate([request.prompt for request in requests], params)
    seconds = time.perf_counter() - start
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": num_input + num_output,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }
