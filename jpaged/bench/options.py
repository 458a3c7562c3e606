"""The options that benchmarks have in common, and argparse types that say what is wrong with a number."""

import argparse
import json
import math
from collections.abc import Callable
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


def positive(text: str) -> float:
    """An argparse type: a finite number over 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be over 0, got {text}")
    return value


def rate(text: str) -> float:
    """An argparse type: requests a second, over 0; inf is all at once."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a rate must be over 0 (inf sends all at once), got {text}")
    return value


def fraction(text: str) -> float:
    """An argparse type: a number in [0, 1)."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


def percent(text: str) -> float:
    """An argparse type: a number in [0, 100]."""
    value = _number(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"a percentile must be in [0, 100], got {text}")
    return value


def list_of[T](parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argparse type: values separated by commas."""

    def parse_list(text: str) -> list[T]:
        return [parse(part.strip()) for part in text.split(",")]

    return parse_list


def json_object(text: str) -> dict:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        "--output-json",
        dest="json",
        type=Path,
        metavar="FILE",
        help="also write the numbers there",
    )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text}")
    return value
