"""Measured tiles: found by what they were measured for, and only there."""

import dataclasses
import json

import jax
import pytest

from pallas_kernels import PoolLayout, measured_tiles
from pallas_kernels.paged_attention import Tiles, tile_table
from pallas_kernels.paged_attention.tile_table import PATH_VARIABLE, tile_key, tuned

DEFAULT = Tiles(partition=64, pairs=8, few_pairs=8, prefill_rows=128)
CPU = PoolLayout(3, 64, 16, "bfloat16")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Makes a table the one in use."""

    def use(table) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(table if isinstance(table, str) else json.dumps(table))
        monkeypatch.setenv(PATH_VARIABLE, str(path))

    return use


def key(query_class, chip="cpu", layout=CPU, group=3, implementation="xla"):
    return tile_key(implementation, chip, layout, group, query_class)


def test_an_entry_changes_the_sizes_that_it_names_and_no_others(write):
    write({
        key("decode"): {"tiles": {"partition": 128}, "microseconds": 7.5},
        key("prefill"): {"tiles": {"prefill_rows": 32}},
    })  # fmt: skip
    assert tuned(DEFAULT, "xla", CPU, 3) == Tiles(partition=128, pairs=8, few_pairs=8, prefill_rows=32)


@pytest.mark.parametrize(
    "other",
    [
        dict(chip="TPU v5 lite"),
        dict(group=4),
        dict(implementation="mosaic_gpu"),
        *(
            dict(layout=dataclasses.replace(CPU, **change))
            for change in (dict(head_dim=128), dict(block_size=32), dict(dtype="int8"), dict(num_kv_heads=8))
        ),
    ],
    ids=str,
)
def test_what_was_measured_for_something_else_changes_nothing(write, other):
    write({key("decode", **other): {"tiles": {"partition": 128}}})
    assert tuned(DEFAULT, "xla", CPU, 3) == DEFAULT


def test_a_program_for_an_absent_chip_asks_for_no_device(write, monkeypatch):
    gpu = dataclasses.replace(CPU, form="gpu")
    write({key("decode", "NVIDIA H200", gpu): {"tiles": {"partition": 128}}})
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("asked for a device"))
    assert tuned(DEFAULT, "xla", gpu, 3) == DEFAULT


def test_a_described_chip_counts_as_the_chip(write):
    gpu = dataclasses.replace(CPU, form="gpu")
    write({key("decode", "NVIDIA H200", gpu): {"tiles": {"partition": 128}}})
    chip = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("model",), abstract_device=chip)):
        assert tuned(DEFAULT, "xla", gpu, 3).partition == 128


def test_without_a_table_the_heuristic_stands(monkeypatch, tmp_path):
    monkeypatch.setattr(tile_table, "BESIDE", tmp_path / "tuned_tiles.json")
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("asked for the backend"))
    assert measured_tiles() == {} and tuned(DEFAULT, "xla", CPU, 3) == DEFAULT


@pytest.mark.parametrize(
    "table, why",
    [
        ("{", "holds no table of tiles"),
        ("[]", "must be a JSON object"),
        ({key("decode"): {"tiles": {"stages": 3}}}, "entry .*/decode does not fit .*stages"),
        ({key("decode"): {}}, "does not fit"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_name(write, table, why):
    write(table)
    with pytest.raises(ValueError, match=why):
        tuned(DEFAULT, "xla", CPU, 3)


def test_a_table_that_was_named_and_is_absent_is_refused(monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, "/absent.json")
    with pytest.raises(ValueError, match="/absent.json"):
        measured_tiles()
