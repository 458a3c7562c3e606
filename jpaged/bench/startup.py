"""`startup`: how long an engine takes to its first token, with no program on disk, and again with those that this left.

    python -m jpaged.bench startup               both, with programs in a folder of their own: minutes of compiling
    python -m jpaged.bench startup --warm-only   one start with the user's own programs

Each start is a fresh process. Seconds count from the start of the process.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time

from jpaged.bench.options import add_json_option
from jpaged.bench.results import load_note, write_json
from jpaged.cli import add_flags as add_config_flags
from jpaged.cli import from_flags
from jpaged.config import EngineConfig

SUMMARY = "seconds from the start of the process to the first token, cold and warm, and programs compiled"
BARS = {"cold": 40, "warm": 6}  # seconds to the first token, on a small CPU
STAGES = ("import", "loaded", "first_token", "ready")
TITLES = {"cold": "Cold start", "warm": "Warm start"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--warm-only",
        action="store_true",
        help="one start, with the programs of --compilation-cache-dir or the user's own; otherwise they go to a "
        "temporary folder",
    )
    add_json_option(parser)
    add_config_flags(parser, EngineConfig, "engine")


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for flags that cannot work, RuntimeError for an engine that does not start."""
    config = from_flags(EngineConfig, args)
    if config.compilation_cache_dir is not None and not args.warm_only:
        raise ValueError("a cold start has no programs: --compilation-cache-dir needs --warm-only")
    print(f"seconds since the process started; {load_note()}")
    print(f"{'start':>8}" + "".join(f"{stage.replace('_', ' '):>13}" for stage in STAGES), flush=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="jpaged-startup-") as folder:
        if not args.warm_only:
            config = dataclasses.replace(config, compilation_cache_dir=folder)
        for name in ("warm",) if args.warm_only else ("cold", "warm"):
            results[name] = start_once(config)
            print(line(name, results[name]), flush=True)
    for name, result in results.items():
        print(f"{TITLES[name]} to first token (s): {result['seconds']['first_token']:.2f} (bar: {BARS[name]})")
        print(f"{TITLES[name]}, programs compiled: {result['programs_compiled']} of {result['programs']}")
    write_json(args.json, results)
    return 0


def start_once(config: EngineConfig) -> dict:
    """Seconds of every stage and what was compiled, from a process of its own."""
    command = [sys.executable, "-m", "jpaged.bench.start_once", json.dumps(vars(config)), repr(time.time())]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if child.returncode:
        reason = (child.stderr.splitlines() or ["it printed nothing"])[-1].removeprefix("error: ")
        raise RuntimeError(f"the engine did not start: {reason}")
    return json.loads(child.stdout.splitlines()[-1])


def line(name: str, result: dict) -> str:
    seconds = "".join(f"{result['seconds'][stage]:>13.1f}" for stage in STAGES)
    return (
        f"{name:>8}{seconds}   {result['programs']} programs, {result['programs_compiled']} compiled; "
        f"XLA compilations in all {result['xla_compiled']}"
    )
