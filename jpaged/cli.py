"""Flags: a frozen dataclass becomes command-line options, and the options become the dataclass again."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from jpaged.config import EngineConfig

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
ALIASES = {
    "device_memory_utilization": ("--gpu-memory-utilization",),
    "tensor_parallel_size": ("-tp",),
}
UNSET = ("auto", "none")  # words for None, where None is allowed


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and which takes --max_model_len for --max-model-len.

    `parse` gives frozen configs; the model's name may also stand alone, as MODEL.
    """

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def parse_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        return super().parse_args([_with_dashes(arg) for arg in args], namespace)

    def parse(self, argv: Sequence[str] | None, **groups: type) -> list:
        """The engine's config, then one of each further class, whose flags stand under its name in the help.

        Exits with status 2 and one line for a flag that cannot work.
        """
        groups = {"engine": EngineConfig, **groups}
        self.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
        for title, config_class in groups.items():
            add_flags(self, config_class, title)
        namespace = self.parse_args(argv)
        if namespace.model_argument is not None:
            if getattr(namespace, "model", namespace.model_argument) != namespace.model_argument:
                self.error(f"MODEL ({namespace.model_argument}) and --model ({namespace.model}) differ: give one")
            namespace.model = namespace.model_argument
        try:
            return [from_flags(config_class, namespace) for config_class in groups.values()]
        except ValueError as error:
            self.error(str(error))


def integer(text: str) -> int:
    """'4096', '4k' = 4000, '4K' = 4096; m and g, M and G likewise."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)", text.replace("_", ""))
    if match is None:
        raise argparse.ArgumentTypeError(f"must be an integer like 4096, 4k (4000) or 4K (4096), got {text!r}")
    number, suffix = match.groups()
    value = float(number) * SUFFIXES[suffix] if "." in number else int(number) * SUFFIXES[suffix]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(value)


def add_flags(parser: argparse.ArgumentParser, config_class: type, title: str) -> None:
    """One flag a field. Only flags that were given appear in the parsed namespace."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config_class)
    for f in fields(config_class):
        _add_flag(group, f, hints[f.name])


def from_flags[T](config_class: type[T], namespace: argparse.Namespace) -> T:
    """The config of the flags that were given, then the environment's, then the defaults.

    Raises the config's ValueError.
    """
    values = {}
    for f in fields(config_class):
        variable = os.environ.get(f.metadata.get("env", ""))
        if hasattr(namespace, f.name):
            values[f.name] = getattr(namespace, f.name)
        elif variable:
            values[f.name] = (variable,) if f.default == () else variable
    return config_class(**values)


def _add_flag(group: argparse._ArgumentGroup, f: Field, hint: object) -> None:
    names = [f"--{f.name.replace('_', '-')}", *ALIASES.get(f.name, ())]
    options = {"dest": f.name, "default": argparse.SUPPRESS, "help": _help(f)}
    if hint is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        if off := f.metadata.get("off"):
            group.add_argument(
                off,
                dest=f.name,
                action="store_false",
                default=argparse.SUPPRESS,
                help=f"the same as --no-{names[0][2:]}",
            )
        return
    is_optional = get_origin(hint) is UnionType and type(None) in get_args(hint)
    kind = next(a for a in get_args(hint) if a is not type(None)) if is_optional else hint
    if get_origin(kind) is tuple:
        group.add_argument(
            *names, action="extend", nargs="+", type=get_args(kind)[0], metavar=f.name.upper(), **options
        )
        return
    metavar, choices = f.metadata.get("metavar"), f.metadata.get("choices")
    parse = integer if kind is int else str if metavar else kind  # what has a name of its own is read by the config
    if is_optional and kind is not str:
        parse = _or_unset(parse)
    group.add_argument(
        *names, type=parse, choices=choices, metavar=metavar or (None if choices else kind.__name__.upper()), **options
    )


def _or_unset(parse):
    def parse_or_unset(text: str):
        return None if text in UNSET else parse(text)

    parse_or_unset.__name__ = parse.__name__  # argparse names it where parsing fails
    return parse_or_unset


def _help(f: Field) -> str:
    text = f.metadata.get("help", "").replace("%", "%%")
    has_default = f.default is not MISSING and f.default not in (None, (), "")
    return f"{text} (default: {f.default})" if has_default and "default:" not in text else text


def _with_dashes(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg
