"""Chips that are not here, as their compilers describe them."""

import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from models.layers import MODEL_AXIS


def gib(size: float) -> int:
    return int(size * 2**30)


@dataclass(frozen=True)
class Chip:
    """`hbm` is what one device may use, in bytes."""

    name: str
    platform: str
    hbm: int
    slices: tuple[tuple[int, str], ...]  # (devices, topology), the smallest first
    options: tuple[tuple[str, str], ...] = ()

    def mesh(self, num_devices: int) -> Mesh:
        """The first devices of the smallest slice that has so many, as the engine's mesh."""
        topology = next(topology for size, topology in self.slices if size >= num_devices)
        devices = _devices(self.platform, topology, self.options)
        return Mesh(np.array(devices[:num_devices]).reshape(1, -1), ("data", MODEL_AXIS))

    @property
    def device(self) -> SimpleNamespace:
        """What the memory plan asks a device."""
        return SimpleNamespace(platform=self.platform, memory_stats=lambda: {"bytes_limit": self.hbm})


@functools.cache
def _devices(platform: str, topology: str, options: tuple[tuple[str, str], ...]):
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **dict(options)).devices
    target = (Path(__file__).parent / "h200_target.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology=topology
    ).devices


# A v4 or v5p chip is one device of two cores; a tpu7x chip is two devices. `hbm` of a TPU is what its compiler names
# when a program is over it; of the H200, what its driver leaves of 141 GB.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", gib(30.75), ((1, "v4:1x1x1"), (4, "v4:2x2x1")), (("chip_config_name", "megacore"),)),
        Chip("v5e", "tpu", gib(15.75), ((1, "v5e:1x1"), (8, "v5e:2x4"))),
        Chip("v5p", "tpu", gib(95.73), ((1, "v5p:1x1x1"), (4, "v5p:2x2x1"), (8, "v5p:2x2x2"))),
        Chip("v6e", "tpu", gib(31.24), ((1, "v6e:1x1"), (4, "v6e:2x2"), (16, "v6e:4x4"))),
        Chip("tpu7x", "tpu", gib(94.74), ((2, "tpu7x:1x1x1"), (8, "tpu7x:2x2x1"))),
        Chip("h200", "gpu", gib(139), ((1, "1x1x1"), (8, "1x1x8"))),
    )
}
