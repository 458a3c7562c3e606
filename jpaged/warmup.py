"""Compiles every program ahead of use and keeps them on disk: `python -m jpaged.warmup`, then a start compiles nothing.

For images, shared file systems and first days: what it fills is what the server or LLM with the same flags looks up.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from jpaged.cli import Parser
from jpaged.engine import LLMEngine


@dataclass(frozen=True)
class WarmupResult:
    """How many programs there are, and how many of them had to be compiled."""

    num_programs: int
    num_compiled: int
    seconds: float

    def __str__(self) -> str:
        num_loaded = self.num_programs - self.num_compiled
        return (
            f"{self.num_programs} programs: {self.num_compiled} compiled, {num_loaded} loaded from the cache, "
            f"{self.seconds:.1f} s"
        )


def warm_up(engine: LLMEngine) -> WarmupResult:
    """Compiles what the cache lacks, several at a time, with a progress bar. Raises what the compiler raised."""
    programs, start = engine.runner.programs, time.monotonic()
    for _ in tqdm(programs.prepare_all(), "compiling", len(programs.keys), unit=" programs"):
        pass
    num_compiled = int(engine.metrics.snapshot()["xla_compiles{phase=warmup}"])
    return WarmupResult(len(programs.keys), num_compiled, time.monotonic() - start)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m jpaged.warmup", description="Compiles every program ahead of use.", allow_abbrev=False
    )
    (config,) = parser.parse(argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        engine = LLMEngine(config)
        result = warm_up(engine)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{result}, in {engine.runner.programs_folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
