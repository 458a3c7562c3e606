"""Traces of request lengths: CSV files of (input, output) token counts."""

import csv
import gzip
import statistics
from collections.abc import Sequence
from pathlib import Path

from report import percentile

INPUT_NAMES = ("input", "prompt", "context", "in")  # a column is known by how its name begins
OUTPUT_NAMES = ("output", "generated", "completion", "out")


def read_lengths(path: Path, max_total: int | None = None) -> list[tuple[int, int]]:
    """The rows of a CSV (or .csv.gz), in order; those with input + output > max_total, or with a 0, left out.

    A header says which columns count; without one they are the first two.
    Raises ValueError, one line with the line number, for what is no pair of lengths; OSError for what cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no CSV: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty")
    columns = 0, 1
    if not all(_is_number(cell) for cell in rows[0][1][:2]):
        columns = _columns(path, rows[0][1])
        rows = rows[1:]
    lengths = []
    for number, row in rows:
        try:
            pair = tuple(_length(row[column]) for column in columns)
        except (IndexError, ValueError):
            raise ValueError(f"{path}, line {number}: expected two lengths, got {','.join(row)!r}") from None
        if min(pair) > 0 and (max_total is None or sum(pair) <= max_total):
            lengths.append(pair)
    if not lengths:
        raise ValueError(f"{path} holds no lengths" + (f" that add up to {max_total} at most" if max_total else ""))
    return lengths


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


def _columns(path: Path, header: list[str]) -> tuple[int, int]:
    names = [name.strip().lower() for name in header]
    found = []
    for wanted in (INPUT_NAMES, OUTPUT_NAMES):
        column = next((names.index(name) for name in names if name.startswith(wanted)), None)
        if column is None:
            raise ValueError(f"{path}: no column is named like {' or '.join(wanted)} in {','.join(header)!r}")
        found.append(column)
    return found[0], found[1]


def describe(values: Sequence[int]) -> dict[str, float]:
    """The quantities by which the data's own SOURCE.txt describes lengths."""
    quantiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {"mean": statistics.fmean(values), **quantiles, "max": max(values)}
