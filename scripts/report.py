"""What the benchmarks print and keep."""

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path


def int_from(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number, at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that percent of values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """'median (least to most)'."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def load_note() -> str:
    """How busy the machine is: a number measured beside other work is no number."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")


def write_json(path: Path | None, numbers: dict) -> None:
    if path is not None:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
