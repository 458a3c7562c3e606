"""What the offline benchmarks have in common: an LLM made from flags, and whether it compiled meanwhile."""

import argparse
import sys

import jpaged
from jpaged.cli import from_flags
from jpaged.config import EngineConfig


def make_llm(args: argparse.Namespace) -> "jpaged.LLM":
    """Raises ValueError or OSError for flags or a model that cannot work."""
    return jpaged.LLM(**vars(from_flags(EngineConfig, args)))


def num_compiled(llm: "jpaged.LLM") -> int:
    return llm.engine.runner.programs.num_compiled


def warn_if_compiled(llm: "jpaged.LLM", before: int) -> None:
    """A measurement that waited for the compiler is one of the compiler."""
    if num_compiled(llm) > before:
        print(f"warning: {num_compiled(llm) - before} programs were compiled while it ran", file=sys.stderr)
