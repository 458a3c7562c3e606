"""Output tokens a second of the whole engine, and how near its decode steps are to the bare matmuls.

    python scripts/bench_throughput.py --num-requests 32 --prompt-len 128 --output-len 128

All requests start at once: random prompts (fresh ones each run, so that nothing is in the prefix cache), greedy, EOS
ignored. The first run compiles and is not counted. Machines differ and are busy, so the same process also times the
matmuls of one decode step alone, every weight once, as `models.layers.matmul` does them: compare that ratio.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jpaged import LLM, SamplingParams
from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, spread, write_json
from jpaged.config import DEFAULT_MODEL
from jpaged.engine import LLMEngine
from models.layers import matmul

BARS = {(32, 128, 128): 350}  # (requests, prompt, output): output tokens/s
SINGLE_BAR = 60  # tokens/s of decode of one request
YARDSTICK_CALLS = 10  # between runs


@dataclass
class Run:
    """seconds: of the whole run. decode_steps: seconds of each step in which all requests decoded and nothing else ran."""

    seconds: float
    decode_steps: list[float]


def run_requests(engine: LLMEngine, prompts: list[list[int]], output_len: int) -> Run:
    """All prompts at once, to their end."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    decode_steps = []
    while engine.has_work:
        running = engine.scheduler.running
        is_steady = len(running) == len(prompts) and all(s.length - s.num_computed_tokens == 1 for s in running)
        start = time.perf_counter()
        engine.step()
        if is_steady:
            decode_steps.append(time.perf_counter() - start)
    return Run(time.perf_counter() - begin, decode_steps)


class Yardstick:
    """The matmuls of a decode step of num_rows tokens, one after the other, and nothing else."""

    def __init__(self, engine: LLMEngine, num_rows: int):
        self._weights = [leaf for leaf in engine.runner.leaves if leaf.ndim == 2]
        self._rows = {
            width: jnp.ones((num_rows, width), jnp.float32) for width in {weight.shape[1] for weight in self._weights}
        }
        self._compute = jax.jit(self._chain)
        self._compute(self._weights, self._rows).block_until_ready()

    @staticmethod
    def _chain(weights, rows):
        last = jnp.zeros((1, 1))
        for weight in weights:
            last = matmul(rows[weight.shape[1]] + last[:, :1], weight) * 1e-3  # waits for the product before
        return last

    def measure(self) -> list[float]:
        """Seconds of each of a few calls."""
        times = []
        for _ in range(YARDSTICK_CALLS):
            start = time.perf_counter()
            self._compute(self._weights, self._rows).block_until_ready()
            times.append(time.perf_counter() - start)
        return times


@dataclass
class Case:
    """One shape of load, run a few times; the yardstick's calls lie between the runs."""

    num_requests: int
    prompt_len: int
    output_len: int
    runs: list[Run]
    yardstick: list[float]

    @property
    def output_rates(self) -> list[float]:
        return [self.num_requests * self.output_len / run.seconds for run in self.runs]

    @property
    def decode_steps(self) -> list[float]:
        return [seconds for run in self.runs for seconds in run.decode_steps]

    @property
    def decode_rates(self) -> list[float]:
        return [self.num_requests * len(run.decode_steps) / sum(run.decode_steps) for run in self.runs]

    def numbers(self) -> dict:
        step, bare = statistics.median(self.decode_steps), statistics.median(self.yardstick)
        return {
            "num_requests": self.num_requests,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "output_tokens_per_s": self.output_rates,
            "decode_tokens_per_s": self.decode_rates,
            "decode_step_ms": 1e3 * step,
            "matmuls_ms": 1e3 * bare,
            "step_over_matmuls": step / bare,
        }

    def report(self) -> str:
        total = 1 + self.prompt_len / self.output_len
        bar = BARS.get((self.num_requests, self.prompt_len, self.output_len))
        numbers = self.numbers()
        lines = [
            f"{self.num_requests} x ({self.prompt_len} + {self.output_len}), median of {len(self.runs)} runs (least to most)",
            f"  output tokens/s         {spread(self.output_rates)}" + (f"   bar {bar}" if bar else ""),
            f"  total tokens/s          {spread([total * rate for rate in self.output_rates])}",
            f"  decode tokens/s         {spread(self.decode_rates)}"
            + (f"   bar {SINGLE_BAR}" if self.num_requests == 1 else ""),
            f"  a decode step           {spread([1e3 * seconds for seconds in self.decode_steps], 2)} ms",
            f"  its matmuls alone       {spread([1e3 * seconds for seconds in self.yardstick], 2)} ms",
            f"  step over matmuls       {numbers['step_over_matmuls']:.2f}",
        ]
        return "\n".join(lines)


def measure(llm: LLM, rng: random.Random, num_requests: int, prompt_len: int, output_len: int, repeat: int) -> Case:
    """Raises ValueError for requests that the engine cannot serve."""
    engine = llm.engine

    def prompts() -> list[list[int]]:
        vocab_size = engine.model_config.vocab_size
        return [[rng.randrange(vocab_size) for _ in range(prompt_len)] for _ in range(num_requests)]

    num_rows, _ = engine.runner.buckets.choose(num_requests, num_requests)
    yardstick = Yardstick(engine, num_rows)
    case = Case(num_requests, prompt_len, output_len, [], yardstick.measure())
    for number in tqdm(
        range(1 + repeat), desc=f"{num_requests} x ({prompt_len} + {output_len})", unit="run", leave=False
    ):
        compiled = engine.runner.programs.num_compiled
        run = run_requests(engine, prompts(), output_len)
        case.yardstick += yardstick.measure()
        if number == 0:
            continue
        if engine.runner.programs.num_compiled > compiled:
            print(f"warning: run {number} waited for the compiler", file=sys.stderr)
        case.runs.append(run)
    if not case.decode_steps:
        raise ValueError(
            f"{num_requests} requests of {prompt_len} + {output_len} tokens never decode all at once: "
            "raise --output-len or the pool"
        )
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--num-requests", type=int_from(1), default=32)
    parser.add_argument("--prompt-len", type=int_from(1), default=128)
    parser.add_argument("--output-len", type=int_from(2), default=128)
    parser.add_argument("--repeat", type=int_from(1), default=3, help="runs that count (default: %(default)s)")
    parser.add_argument("--no-single", action="store_true", help="leave out the runs of one request")
    parser.add_argument("--block-size", type=int_from(1), default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_json_option(parser)
    args = parser.parse_args()
    options = {} if args.block_size is None else {"block_size": args.block_size}
    cases = [args.num_requests] if args.no_single or args.num_requests == 1 else [args.num_requests, 1]
    rng = random.Random(args.seed)
    numbers = []
    try:
        llm = LLM(args.model, dtype=args.dtype, **options)
        engine = llm.engine
        print(
            f"{args.model}, {engine.runner.step.dtype.name}, block size {engine.spec.block_size}, jax {jax.__version__} on "
            f"{engine.runner.mesh.devices.flat[0].device_kind}, {load_note()}"
        )
        for num_requests in cases:
            case = measure(llm, rng, num_requests, args.prompt_len, args.output_len, args.repeat)
            print(case.report(), flush=True)
            numbers.append(case.numbers())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    write_json(args.json, {"jax": jax.__version__, "load": load_note(), "cases": numbers})


if __name__ == "__main__":
    main()
