"""Traces: CSV files of requests' lengths in tokens, and of when they arrived where that is known."""

import csv
import gzip
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

SHAREGPT_LIKE = Path(__file__).parent / "sharegpt_like.csv"  # made by scripts/make_synthetic_trace.py
INPUT_NAMES = ("input", "prompt", "context", "in")  # a column is known by how its name begins
OUTPUT_NAMES = ("output", "generated", "completion", "out")
ARRIVAL_NAMES = ("arrival", "timestamp", "time")


class TraceRow(NamedTuple):
    """arrival: seconds since some moment; None where the trace does not tell."""

    input_len: int
    output_len: int
    arrival: float | None = None


def read_trace(path: Path, max_total: int | None = None) -> list[TraceRow]:
    """The rows of a CSV (or .csv.gz), in order; those with input + output > max_total, or with a 0, left out.

    A header says which columns count; without one they are the two lengths. An arrival is a date and time, seconds, or
    milliseconds where the column's name ends in ms.
    Raises ValueError, one line with the line number, for what is no such row; OSError for what cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no CSV: {error}") from None
    if not lines:
        raise ValueError(f"{path} is empty")
    parse = _Columns.of_lengths_alone()
    if not all(_is_number(cell) for cell in lines[0][1][:2]):
        parse = _Columns.named(path, *lines.pop(0))
    rows = []
    for number, cells in lines:
        try:
            rows.append(parse(cells))
        except (IndexError, ValueError):
            raise ValueError(f"{path}, line {number}: expected {parse.expected}, got {','.join(cells)!r}") from None
    kept = [row for row in rows if min(row[:2]) > 0 and (max_total is None or sum(row[:2]) <= max_total)]
    if not kept:
        raise ValueError(f"{path} holds no lengths" + (f" that add up to {max_total} at most" if max_total else ""))
    return kept


def read_lengths(path: Path, max_total: int | None = None) -> list[tuple[int, int]]:
    """As `read_trace`, (input, output) alone."""
    return [(row.input_len, row.output_len) for row in read_trace(path, max_total)]


class _Columns:
    """Which cells of a line are what."""

    def __init__(self, input_at: int, output_at: int, arrival_at: int | None, parse_arrival: Callable[[str], float]):
        self._input_at, self._output_at, self._arrival_at = input_at, output_at, arrival_at
        self._parse_arrival = parse_arrival
        self.expected = "two lengths" if arrival_at is None else "an arrival and two lengths"

    @classmethod
    def of_lengths_alone(cls) -> "_Columns":
        return cls(0, 1, None, _seconds)

    @classmethod
    def named(cls, path: Path, number: int, header: list[str]) -> "_Columns":
        names = [name.strip().lower() for name in header]
        found = [_find(names, wanted) for wanted in (INPUT_NAMES, OUTPUT_NAMES, ARRIVAL_NAMES)]
        for at, wanted in zip(found[:2], (INPUT_NAMES, OUTPUT_NAMES)):
            if at is None:
                wanted, header = " or ".join(wanted), ",".join(header)
                raise ValueError(f"{path}, line {number}: no column is named like {wanted} in {header!r}")
        is_in_ms = found[2] is not None and names[found[2]].endswith("ms")
        return cls(*found, _milliseconds if is_in_ms else _seconds)

    def __call__(self, cells: list[str]) -> TraceRow:
        arrival = None if self._arrival_at is None else self._parse_arrival(cells[self._arrival_at])
        return TraceRow(_length(cells[self._input_at]), _length(cells[self._output_at]), arrival)


def _find(names: list[str], wanted: tuple[str, ...]) -> int | None:
    """The first column that begins with the first of the wanted words that any begins with: input before index."""
    return next((i for word in wanted for i, name in enumerate(names) if name.startswith(word)), None)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _length(cell: str) -> int:
    value = float(cell)
    if value < 0 or value != int(value):
        raise ValueError
    return int(value)


def _seconds(cell: str) -> float:
    value = float(cell) if _is_number(cell) else datetime.fromisoformat(cell.strip()).timestamp()
    if not math.isfinite(value):
        raise ValueError
    return value


def _milliseconds(cell: str) -> float:
    return 1e-3 * _seconds(cell)
