"""The kernels against what this machine can do: decode and KV moves against a copy, prefill against a matmul.

    python scripts/bench_kernels.py                      the chip that JAX sees; under ten minutes
    python scripts/bench_kernels.py --tiny --interpret   every kernel once, in the interpreters: nothing here is a time

Prints for each case the time of a launch, the bandwidth or FLOP/s that this is, the same as a fraction of the copy or
matmul that was measured in the same run, and what paging costs: the same kernel over a random block table against an
identity, and against blocks that it knows to lie one after the other where it has such a form. A launch is all that
the op does, work-lists and combination included.
"""

import argparse
import faulthandler
import statistics
import sys
import time

import jax
from kernel_programs import Bench, is_interpreted, takes
from kernel_steps import LLAMA_8B, SMOLLM2, Case
from kernel_timing import Yardsticks, measure_yardsticks

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, write_json
from pallas_kernels.paged_attention import attention_implementations

DECODE_BAR = {"gpu": 0.80, "tpu": 0.85}  # of the measured copy, where a layer's step reads at least:
DECODE_BAR_BYTES = 64 * 2**20
PREFILL_BAR = 0.70  # of the measured matmul
PAGING_BAR = 1.03  # a random table over an identity, and over blocks known to be contiguous
BLOCK_SIZE = {"cpu": 64, "gpu": 16, "tpu": 64}

CASES = [  # the most telling first: what time does not suffice for is left out
    Case(LLAMA_8B, 64, 4096, with_xla=True, with_moves=True),
    Case(LLAMA_8B, 1, 8192, queries=8192, with_moves=True),
    Case(LLAMA_8B, 16, 1024),
    Case(LLAMA_8B, 4, 8192, queries=512, with_xla=True),
    Case(LLAMA_8B, 64, 4096, dtype="int8"),
    Case(LLAMA_8B, 64, 4096, dtype="float8_e4m3fn"),
    Case(SMOLLM2, 256, 1024, with_moves=True),
    Case(LLAMA_8B, 256, 512),
    Case(LLAMA_8B, 1, 8192),
    Case(LLAMA_8B, 8, 2048, queries=512),
    Case(LLAMA_8B, 1, 2048, queries=2048),
    Case(LLAMA_8B, 1, 32768, queries=2048),
    Case(SMOLLM2, 1, 2048, queries=2048),
    Case(SMOLLM2, 32, 256),
    Case(LLAMA_8B, 8, 2048, queries=512, dtype="int8"),
    Case(LLAMA_8B, 8, 2048, queries=512, dtype="float8_e4m3fn"),
    Case(LLAMA_8B, 16, 1024, dtype="int8", with_xla=True, with_moves=True),
]
CPU_CASES = [
    Case(SMOLLM2, 32, 190, with_moves=True),
    Case(SMOLLM2, 1, 512, queries=512),
    Case(SMOLLM2, 32, 190, dtype="int8"),
    Case(LLAMA_8B, 8, 1024),
    Case(LLAMA_8B, 1, 512, queries=512, with_moves=True),
]
TINY_CASES = [  # the same shapes: an interpreter takes long to build a program, and needs one for both
    Case(SMOLLM2, 4, 20, with_moves=True),
    Case(SMOLLM2, 2, 64, queries=2),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one launch of two small cases: does everything run")
    parser.add_argument("--interpret", action="store_true", help="also the kernels of absent chips, interpreted")
    parser.add_argument("--block-size", type=int_from(8), help="tokens (default: 16 on a GPU, else 64)")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no case after this (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args()
    if args.interpret and not args.tiny:
        parser.error("--interpret needs --tiny: the interpreters are a million times slower than a chip")
    # A kernel that waits for ever cannot be interrupted from Python.
    faulthandler.dump_traceback_later(60 * args.minutes + 50, exit=True)
    return Run(args).all()


class Run:
    """All cases, one after the other. What fails is said, and the rest goes on; numbers are kept row by row."""

    def __init__(self, args: argparse.Namespace):
        device = jax.devices()[0]
        self.args, self.form, self.failures = args, device.platform, []
        self.deadline = time.monotonic() + 60 * args.minutes
        print(f"{device.device_kind}, jax {jax.__version__}, {load_note()}", flush=True)
        self.numbers = {"device": device.device_kind, "jax": jax.__version__, "rows": []}
        self.yardsticks = self._measure_yardsticks("before")

    def all(self) -> int:
        """The exit status."""
        cases = TINY_CASES if self.args.tiny else CPU_CASES if self.form == "cpu" else CASES
        forms = self.form, *(form for form in ("gpu", "tpu") if self.args.interpret and form != self.form)
        print(f"{'':54}{'us a launch':>12}{'':16}{'of yardstick':>13}{'bar':>6}  random table over")
        for case in cases:
            for form in forms:
                if self.args.only not in case.name:
                    continue
                if time.monotonic() > self.deadline:
                    print(f"{case.name}: left out, {self.args.minutes} minutes are over")
                    continue
                self._case(case, form)
        self._measure_yardsticks("after")
        for failure in self.failures:
            print(f"FAILED {failure}")
        return 1 if self.failures else 0

    def _measure_yardsticks(self, when: str) -> Yardsticks:
        found = measure_yardsticks(self.args.tiny)
        print(
            f"{when}: copy {found.bandwidth / 1e9:.1f} GB/s, read and written; matmul "
            f"{found.matmul_rate / 1e12:.2f} TFLOP/s; dispatch {1e6 * found.dispatch:.0f} us",
            flush=True,
        )
        self.numbers[f"yardsticks_{when}"] = vars(found)
        write_json(self.args.json, self.numbers)
        return found

    def _case(self, case: Case, form: str) -> None:
        block_size = self.args.block_size or (16 if self.args.tiny else BLOCK_SIZE[form])
        bench = Bench(case, form, block_size, self.yardsticks, self.args.tiny)
        for name in self._implementations(case, form):
            self._try(f"{name} {case.name}", lambda: self._attention(bench, name))
        if case.with_moves:
            self._try(f"kv_write of {case.name}", lambda: self._move("kv_write", bench, bench.write))
            self._try(f"copy_blocks of {case.name}", lambda: self._move("copy_blocks", bench, bench.copy))

    def _implementations(self, case: Case, form: str) -> list[str]:
        """Which to measure, best first."""
        names = list(attention_implementations(form))
        if is_interpreted(form):
            kernels = [name for name in names if takes(name, form, "interpret")]
            if not kernels:
                print(f"{form}: there is no kernel to interpret")
            return kernels
        return names if case.with_xla else names[:1]

    def _try(self, what: str, measure) -> None:
        try:
            measure()
        except NotImplementedError as error:
            print(f"{what}: cannot, {error}", flush=True)
        except Exception as error:  # a compiler's refusal, a full memory: unattended, the other cases still count
            self.failures.append(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            print(self.failures[-1], flush=True)

    def _attention(self, bench: Bench, name: str) -> None:
        case = bench.case
        tables = ["identity", "random"] + ["contiguous"] * takes(name, bench.form, "contiguous")
        times = bench.attention(name, tuple(tables))
        middle = {table: statistics.median(taken) for table, taken in times.items()}
        row = {"op": name, "case": case.name, "form": bench.form, "block_size": bench.block_size, "seconds": times}
        row |= {"needed_bytes": case.needed_bytes, "flops": case.flops}
        row |= {f"random_over_{table}": middle["random"] / middle[table] for table in tables if table != "random"}
        if case.query_class == "decode":
            bar = DECODE_BAR.get(bench.form) if case.kv_bytes >= DECODE_BAR_BYTES else None
            self._row(row, middle["random"], "bandwidth", case.needed_bytes, bar)
        else:
            self._row(row, middle["random"], "matmul_rate", case.flops, PREFILL_BAR if bench.form != "cpu" else None)

    def _move(self, op: str, bench: Bench, measure) -> None:
        times, num_bytes = measure()
        row = {"op": op, "case": bench.case.name, "form": bench.form, "block_size": bench.block_size, "seconds": times}
        self._row(row | {"needed_bytes": num_bytes}, statistics.median(times), "bandwidth", num_bytes, None)

    def _row(self, row: dict, seconds: float, yardstick: str, amount: int, bar: float | None) -> None:
        """Prints a row and keeps it."""
        rate = amount / seconds
        row["fraction"], row["bar"] = rate / getattr(self.yardsticks, yardstick), bar
        self.numbers["rows"].append(row)
        write_json(self.args.json, self.numbers)
        if self.args.tiny:
            print(f"{row['form']}: {row['op']} {row['case']}: ran", flush=True)
            return
        achieved = f"{rate / 1e9:.1f} GB/s" if yardstick == "bandwidth" else f"{rate / 1e12:.2f} TFLOP/s"
        paging = ", ".join(
            f"{key.removeprefix('random_over_')} {row[key]:.3f}" + f" (bar {PAGING_BAR})" * (self.form != "cpu")
            for key in row if key.startswith("random_over_")
        )  # fmt: skip
        print(
            f"{row['op'] + ' ' + row['case']:54}{1e6 * seconds:12.1f}{achieved:>16}{row['fraction']:13.1%}"
            f"{'' if bar is None else f'{bar:.0%}':>6}  {paging}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
