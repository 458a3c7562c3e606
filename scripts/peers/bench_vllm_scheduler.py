"""Our host step beside vLLM's own V1 scheduler, in turns, on one core.

    python scripts/peers/bench_vllm_scheduler.py

Milliseconds a step in which every sequence decodes. Ours is schedule, build the batch, and update
(scripts/bench_scheduler.py); theirs is `schedule()` and `update_from_output()`: building their batch is not counted.
The bar is what theirs takes at 32 sequences, and half of it from 256.
"""

import argparse
import logging
import os
import statistics
import sys
from pathlib import Path

from install import DEFAULT_FOLDER
from peer import HERE, MODEL, VLLM
from process import WorkerProcess
from table import aligned, spread_of

sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent.parent))

from bench_scheduler import run_decodes

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, write_json


def milliseconds(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of each part, and of a step."""
    times = times | {"step": [sum(parts) for parts in zip(*times.values())]}
    return {part: 1e3 * statistics.median(seconds) for part, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where install.py put vLLM")
    parser.add_argument("--num-seqs", type=int_from(1), nargs="+", default=[32, 256, 512, 1024])
    parser.add_argument("--prompt-len", type=int_from(1), default=200)
    parser.add_argument("--steps", type=int_from(1), default=200)
    parser.add_argument("--block-size", type=int_from(1), default=16)
    parser.add_argument("--rounds", type=int_from(1), default=3)
    add_json_option(parser)
    args = parser.parse_args()
    if why := VLLM.why_absent(args.folder):
        sys.exit(f"error: {VLLM.name} in {args.folder}: {why}")
    logging.disable(logging.WARNING)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # and vLLM's process, which inherits it
    command = [str(VLLM.python(args.folder)), str(HERE / "vllm_scheduler.py"), str(args.folder / MODEL)]
    try:
        worker = WorkerProcess(command, {}, args.folder / "vllm-scheduler.log")
    except OSError as error:
        sys.exit(f"error: {error}")
    numbers: dict[int, list[dict]] = {}
    try:
        settings = worker.wait_until_ready()
        for size in args.num_seqs:
            for _ in range(args.rounds):
                request = {"num_seqs": size, "prompt_len": args.prompt_len, "num_steps": args.steps}
                theirs = worker.ask(request | {"block_size": args.block_size}, "schedule", "update")
                ours = run_decodes(size, args.prompt_len, args.steps, args.block_size)
                numbers.setdefault(size, []).append({"jpaged": milliseconds(ours), "vllm": milliseconds(theirs)})
    except OSError as error:
        sys.exit(f"error: {error}")
    finally:
        worker.close()
    print(f"ms a step, median (least to most) of {args.rounds} rounds; {settings}; {load_note()}")
    rows = [["running", "jpaged", "vLLM schedule", "vLLM update", "vLLM step", "vLLM over jpaged", ""]]
    for size, rounds in numbers.items():
        columns = [
            [ours["jpaged"]["step"] for ours in rounds],
            *([theirs["vllm"][part] for theirs in rounds] for part in ("schedule", "update", "step")),
            [both["vllm"]["step"] / both["jpaged"]["step"] for both in rounds],
        ]
        is_met = statistics.median(columns[-1]) >= (2 if size >= 256 else 1)
        rows.append([str(size), *(spread_of(values, 2) for values in columns), "" if is_met else "MISS"])
    print(aligned(rows))
    write_json(args.json, {"settings": settings, "ms_a_step": numbers})


if __name__ == "__main__":
    main()
