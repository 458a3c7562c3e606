"""How long an engine takes to start: with an empty cache of programs, and again with the cache that this left.

    python scripts/bench_startup.py               both, in a cache of their own: minutes of compiling
    python scripts/bench_startup.py --warm-only   one start with the user's own cache

Each start is a fresh process, which does what the server does: load the model, answer a request while the programs are
compiled in the background, and be ready when all are there. Seconds count from the start of the process.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

from report import add_json_option, load_note, write_json

BAR_SECONDS = 10
POLL_SECONDS = 0.02
STAGES = ("import", "loaded", "first_token", "ready")
PROMPT = "The capital of France is"


def count_programs(counts: Counter) -> None:
    """From now on counts how many programs are "loaded" from the program cache and how many it "stored"."""
    from jpaged.program_cache import ProgramCache

    def counting(method, name):
        def call(self, *args):
            result = method(self, *args)
            counts[name] += name == "stored" or result is not None
            return result

        return call

    ProgramCache._load = counting(ProgramCache._load, "loaded")
    ProgramCache._store = counting(ProgramCache._store, "stored")


async def start_engine(model: str, cache_dir: str | None, started: float) -> dict:
    """One start, in this process: seconds since started of every stage, and what was compiled."""
    from jpaged import AsyncLLM, EngineConfig, SamplingParams
    from jpaged.program_cache import compile_counter

    seconds = {"import": time.time() - started}
    programs: Counter = Counter(loaded=0, stored=0)
    count_programs(programs)
    engine = AsyncLLM.from_config(EngineConfig(model=model, compilation_cache_dir=cache_dir))
    seconds["loaded"] = time.time() - started
    prompt = engine.tokenizer.encode(PROMPT)
    async for _ in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=4), "first"):
        seconds.setdefault("first_token", time.time() - started)
    while not engine.is_ready():
        if error := engine.warmup_error():
            raise RuntimeError(error)
        await asyncio.sleep(POLL_SECONDS)
    seconds["ready"] = time.time() - started
    return {
        "seconds": seconds,
        "programs": engine.warmup_progress()[1],
        "programs_loaded": programs["loaded"],
        "programs_stored": programs["stored"],
        "xla_compiled": compile_counter.num_compiled,
        "xla_cache_hits": compile_counter.num_hits,
    }


def run_child(model: str, cache_dir: str | None) -> dict:
    """The same in a process of its own. Raises RuntimeError where that fails."""
    command = [sys.executable, __file__, "--model", model, "--child", repr(time.time())]
    command += ["--cache-dir", cache_dir] if cache_dir else []
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise RuntimeError(f"the engine did not start (status {child.returncode})")
    return json.loads(child.stdout.splitlines()[-1])


def report(name: str, result: dict, bar: str = "") -> str:
    seconds = "".join(f"{result['seconds'][stage]:>13.1f}" for stage in STAGES)
    return (
        f"{name:>8}{seconds}   {result['programs']} programs: {result['programs_loaded']} from disk, "
        f"{result['programs_stored']} newly kept; XLA compiled {result['xla_compiled']}, cache hits {result['xla_cache_hits']}{bar}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: the engine's")
    parser.add_argument("--cache-dir", metavar="DIR", help="keep the programs there (default: a temporary folder)")
    parser.add_argument("--warm-only", action="store_true", help="one start, with --cache-dir or the user's own cache")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # the time at which this process was started
    add_json_option(parser)
    args = parser.parse_args()
    if args.model is None:
        from jpaged.config import DEFAULT_MODEL

        args.model = DEFAULT_MODEL
    if args.child is not None:
        try:
            result = asyncio.run(start_engine(args.model, args.cache_dir, args.child))
        except (ValueError, OSError, RuntimeError) as error:
            sys.exit(f"error: {error}")
        print(json.dumps(result), flush=True)
        os._exit(0)  # the engine's threads have nothing left to do

    print(f"seconds since the process started; {load_note()}")
    print(f"{'start':>8}" + "".join(f"{stage.replace('_', ' '):>13}" for stage in STAGES), flush=True)
    results = {}
    try:
        with tempfile.TemporaryDirectory(prefix="jpaged-startup-") as temporary:
            cache_dir = args.cache_dir if args.cache_dir or args.warm_only else temporary
            for name in ("warm",) if args.warm_only else ("cold", "warm"):
                results[name] = run_child(args.model, cache_dir)
                bar = f"   bar: ready in {BAR_SECONDS}" if name == "warm" else ""
                print(report(name, results[name], bar), flush=True)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    write_json(args.json, results)


if __name__ == "__main__":
    main()
