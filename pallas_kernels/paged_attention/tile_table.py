"""Tile sizes that were measured on a chip, over the heuristics that guess them. `scripts/tune_tiles.py` writes the table.

A JSON object: `{key: {"tiles": {field: size}, ...}}`, where other members of an entry are for the reader. An entry names
only the fields in which it differs from the heuristic, so a field that nobody measured follows the heuristic still.
"""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import TypeVar

import jax

from ..layout import Form, PoolLayout

QUERY_CLASSES = ("decode", "verify", "prefill")
PATH_VARIABLE = "JPAGED_TILES"
BESIDE = Path(__file__).with_name("tuned_tiles.json")  # read where the variable is not set

Tiles = TypeVar("Tiles")


def tuned(default: Tiles, implementation: str, layout: PoolLayout, group: int) -> Tiles:
    """`default` with the sizes that the table has for this implementation, chip and shape.

    `layout` is of one shard; `group` is query heads a KV head. Raises `ValueError` for a table that does not fit.
    """
    table = measured_tiles()
    chip = _chip(layout.form) if table else None  # without a table nobody needs to know the chip
    if chip is None:
        return default
    for query_class in QUERY_CLASSES:
        key = tile_key(implementation, chip, layout, group, query_class)
        try:
            default = dataclasses.replace(default, **table.get(key, {"tiles": {}})["tiles"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{table_path()}: entry {key} does not fit ({error}); measure anew with scripts/tune_tiles.py"
            ) from error
    return default


def tile_key(implementation: str, chip: str, layout: PoolLayout, group: int, query_class: str) -> str:
    """What a measurement holds for. KV heads are part of it: a TPU kernel moves all heads of a token together."""
    return (
        f"{implementation}/{chip}/K{layout.num_kv_heads}/G{group}/D{layout.head_dim}/B{layout.block_size}"
        f"/{layout.dtype}/{query_class}"
    )


def table_path() -> Path:
    return Path(os.environ.get(PATH_VARIABLE) or BESIDE)


def measured_tiles() -> dict[str, dict]:
    """The table in use; empty where there is none. Raises `ValueError` for a file that was named and cannot be read."""
    path = table_path()
    if path == BESIDE and not path.exists():
        return {}
    return _read(path)


@functools.cache
def _read(path: Path) -> dict[str, dict]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no table of tiles: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds no table of tiles: it must be a JSON object")
    return table


def _chip(form: Form) -> str | None:
    """The kind of device that a program is traced for, or None where that cannot be told.

    A program may be compiled for a chip that is not there, under a mesh that describes it: no device is asked for
    unless the default backend has it.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == form else None
