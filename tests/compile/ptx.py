"""What Mosaic GPU's compiler says of the kernels in a program, for a chip that is not here."""

import dataclasses
import functools
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REGISTERS_PER_SM, SMEM_PER_SM, THREADS_PER_SM = 65_536, 233_472, 2048
_TRANSFER = re.compile(
    r"arrive_expect_tx .*?%c(?P<expected>\d+)_i32|"
    r"async_load.*?slice_lengths = array<i64: (?P<lengths>[-\d, ]+)>.*?memref<[\dx]+x(?P<dtype>\w+)>"
)
_BYTES = {"bf16": 2, "f32": 4, "i8": 1, "f8E4M3FN": 1}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel. `loads` and `expected` are in the order of the text: bytes of each TMA load, and announced."""

    name: str
    ptx: str
    registers: int
    spilled_bytes: int
    warnings: tuple[str, ...]
    smem: int
    threads: int
    loads: tuple[int, ...]
    expected: tuple[int, ...]

    @property
    def ctas_per_sm(self) -> int:
        per_thread = -(-self.registers // 8) * 8
        return min(
            REGISTERS_PER_SM // (per_thread * self.threads), SMEM_PER_SM // (self.smem + 1024),
            THREADS_PER_SM // self.threads,
        )  # fmt: skip

    @property
    def instructions(self) -> int:
        """PTX instructions: lines that end a statement, but declarations."""
        lines = (line.strip() for line in self.ptx.splitlines())
        return sum(line.endswith(";") and not line.startswith(".") for line in lines)

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)

    @property
    def products(self) -> set[tuple[int, int, int]]:
        """The (m, n, k) of its wgmma."""
        found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", self.ptx)
        return {tuple(map(int, shape)) for shape in found}


@functools.cache
def h200() -> NamedSharding:
    """Replicated over the one device of a machine with one H200."""
    target = (Path(__file__).parent / "h200_target.textproto").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    return NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its HLO, and bytes."""

    text: str
    alias_bytes: int
    temp_bytes: int


def compile_for_h200(function, *structs, **jit_options) -> tuple[Program, dict[str, Kernel]]:
    """The compiled program and its Mosaic kernels by name. `structs` are pytrees of anything with shape and dtype.

    In a process of its own that has compiled nothing before: Mosaic keeps what it has lowered, and dumps only half of the
    files of a kernel that it meets again. So `function` must be one that pickle can name.
    """
    with ProcessPoolExecutor(1, mp_context=_clean_processes()) as process:
        return process.submit(_compile, function, structs, jit_options).result()


@functools.cache
def _clean_processes():
    """Forks of a process that has imported this file and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _compile(function, structs, jit_options):
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200()), structs)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        compiled = jax.jit(function, **jit_options).lower(*structs).compile()
        kernels = [_read(path) for path in sorted(Path(folder).glob("*.ptx"))]
    memory = compiled.memory_analysis()
    program = Program(compiled.as_text(), memory.alias_size_in_bytes, memory.temp_size_in_bytes)
    return program, {kernel.name: kernel for kernel in kernels}


def _read(ptx_path: Path) -> Kernel:
    def text(kind):
        return ptx_path.with_suffix("").with_name(f"{ptx_path.stem}.{kind}").read_text()

    ptx, report, resources = ptx_path.read_text(), text("ptxas"), text("resources.txt")
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    loads, expected = [], []
    for found in _TRANSFER.finditer(text("before_layout_inference.txt")):
        if found["expected"]:
            expected.append(int(found["expected"]))
        else:
            lengths = [int(x) for x in found["lengths"].split(",")]
            loads.append(_BYTES[found["dtype"]] * int(np.prod([x for x in lengths if x > 0])))
    return Kernel(
        name=ptx_path.stem.rsplit("_", 1)[0],
        ptx=ptx,
        registers=int(re.search(r"Used (\d+) registers", report)[1]),
        spilled_bytes=int(re.search(r"(\d+) bytes spill stores", report)[1]),
        warnings=tuple(re.findall(r".*(?:warning|serialized).*", report)),
        smem=int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]) + 8 * sum(int(n) * int(c) for n, c in barriers),
        threads=int(np.prod([int(x) for x in re.search(r"\.maxntid ([\d, ]+)", ptx)[1].split(",")])),
        loads=tuple(loads),
        expected=tuple(expected),
    )


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
