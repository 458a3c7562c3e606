"""Measures tile sizes on the chip that JAX sees, and writes those that beat the heuristic into a table.

    python scripts/tune_tiles.py                      writes pallas_kernels/paged_attention/tuned_tiles.json
    JPAGED_TILES=mine.json python scripts/tune_tiles.py --output mine.json

From the heuristic's tiles, one size after the other is tried at other values, and kept where the case becomes faster by
more than noise. A candidate is tried as a table, by the way on which the op finds it later. What the compiler or the
kernel refuses is passed over. Entries of other chips and shapes that the table has already are left as they are.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
from kernel_programs import Bench, attention_program
from kernel_steps import LLAMA_8B, SMOLLM2, Case
from kernel_timing import measure_yardsticks

from jpaged.bench.options import int_from
from jpaged.bench.results import load_note
from pallas_kernels.paged_attention import attention_implementations
from pallas_kernels.paged_attention.tile_table import BESIDE, PATH_VARIABLE, tile_key

MARGIN = 0.03  # faster by less is noise
# The sizes of each class in an implementation's tiles, and what to try. No size stands under two classes: decode and
# prefill of one engine share their tiles.
CANDIDATES = {
    "xla": {"decode": {"partition": (64, 128, 256)}, "prefill": {"prefill_rows": (32, 64, 128, 256)}},
    "mosaic_gpu": {
        "decode": {
            "tile_kv": (64, 128),
            "stages": (2, 3, 4, 6),
            "ctas": (132, 264),
            "partition": (256, 512, 1024, 2048),
        },
        "prefill": {"prefill_tile_kv": (64, 128), "prefill_consumers": (1, 2, 3), "prefill_stages": (2, 3, 4)},
    },
    "mosaic_tpu": {
        "decode": {"decode_kv": (128, 256, 512), "fetch": (256, 512, 1024, 2048), "buffers": (2, 3, 4, 8)},
        "prefill": {"prefill_q": (64, 128, 256, 512), "strip": (16, 32, 64, 128), "prefill_kv": (128, 256, 512)},
    },
}
CASES = [
    Case(LLAMA_8B, 64, 4096),
    Case(LLAMA_8B, 4, 8192, queries=512),
    Case(LLAMA_8B, 64, 4096, dtype="int8"),
    Case(LLAMA_8B, 64, 4096, dtype="float8_e4m3fn"),
    Case(SMOLLM2, 256, 1024),
    Case(SMOLLM2, 4, 2048, queries=512),
]
CPU_CASES = [Case(SMOLLM2, 32, 315), Case(SMOLLM2, 1, 512, queries=512)]
TINY_CASES = [Case(SMOLLM2, 4, 20), Case(SMOLLM2, 2, 64, queries=2)]
BLOCK_SIZES = {"cpu": (64,), "gpu": (16, 64), "tpu": (64, 128)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=BESIDE, help="the table to write (default: %(default)s)")
    parser.add_argument("--block-size", type=int_from(8), help="only this one")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--minutes", type=float, default=20.0, help="try nothing new after this (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small cases, once each: does everything run")
    args = parser.parse_args()
    device = jax.devices()[0]
    name = next(iter(attention_implementations(device.platform)))
    print(f"{name} on {device.device_kind}, jax {jax.__version__}, {load_note()}", flush=True)
    yardsticks = measure_yardsticks(args.tiny)
    deadline = time.monotonic() + 60 * args.minutes
    table = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    cases = TINY_CASES if args.tiny else CPU_CASES if device.platform == "cpu" else CASES
    for case in (case for case in cases if args.only in case.name):
        for block_size in [args.block_size] if args.block_size else BLOCK_SIZES[device.platform]:
            bench = Bench(case, device.platform, block_size, yardsticks, args.tiny)
            entry = tune(bench, name, device.device_kind, deadline)
            key = key_of(bench, name, device.device_kind)
            table.pop(key, None)
            if entry is not None:
                table[key] = entry
                args.output.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{args.output}: {len(table)} entries")
    return 0


def key_of(bench: Bench, name: str, chip: str) -> str:
    return tile_key(name, chip, bench.layout, bench.case.heads.group, bench.case.query_class)


def tune(bench: Bench, name: str, chip: str, deadline: float) -> dict | None:
    """The entry for one case, or None where the heuristic is as good or the implementation cannot."""
    key = key_of(bench, name, chip)
    found, best = {}, measure(bench, name, key, {})
    if best is None:
        return None
    by_heuristic = best
    for field, values in CANDIDATES[name][bench.case.query_class].items():
        for value in values:
            if time.monotonic() > deadline:
                print("  the time is over")
                break
            seconds = measure(bench, name, key, found | {field: value})
            if seconds is not None and seconds < best * (1 - MARGIN):
                found, best = found | {field: value}, seconds
    print(f"{key}: {1e6 * by_heuristic:.1f} us by the heuristic, {1e6 * best:.1f} with {found}", flush=True)
    if not found:
        return None
    return {"tiles": found, "us": 1e6 * best, "us_by_heuristic": 1e6 * by_heuristic, "jax": jax.__version__}


def measure(bench: Bench, name: str, key: str, tiles: dict[str, int]) -> float | None:
    """Seconds of a launch with these sizes over the heuristic; None, and a line that says why, where that fails."""
    attention_program.cache_clear()  # a program does not know that its table has changed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiles.json"
        path.write_text(json.dumps({key: {"tiles": tiles}}))
        before = os.environ.get(PATH_VARIABLE)
        os.environ[PATH_VARIABLE] = str(path)
        try:
            seconds = statistics.median(bench.attention(name, ("random",))["random"])
        except Exception as error:  # each compiler refuses in its own way; another candidate may do
            print(f"  {tiles}: {type(error).__name__}: {str(error).strip().splitlines()[0]}", flush=True)
            return None
        finally:
            del os.environ[PATH_VARIABLE]
            if before is not None:
                os.environ[PATH_VARIABLE] = before
    print(f"  {tiles}: {1e6 * seconds:.1f} us", flush=True)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
