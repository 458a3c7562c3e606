"""What a benchmark prints beside its numbers, and the file that it keeps them in."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path


def spread(values: Sequence[float], digits: int = 1) -> str:
    """'median (least to most)'."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def load_note() -> str:
    """How busy the machine is: a number measured beside other work is no number."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def write_json(path: Path | None, numbers: object) -> None:
    if path is not None:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
