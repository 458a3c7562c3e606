"""The TPU kernels compiled for chips that are not there: libtpu accepts them, and they leave the pool where it is.

What the interpreter accepts, Mosaic may refuse, and what Mosaic accepts, XLA may surround with copies of the pool. No
one number shows the latter: without donation little is aliased and temporaries are small, without
`input_output_aliases` all is aliased and a temporary is the pool. So three gates, and for each a program that fails it.
"""

import dataclasses
import functools
import math
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    AttentionMetadata,
    PoolLayout,
    copy_blocks,
    default_tpu_tiles,
    kv_write,
    pool_struct,
    ragged_paged_attention,
)
from pallas_kernels.kv_write import mosaic_tpu as kv_write_module

pytestmark = pytest.mark.compile

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
VMEM = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "tpu7x": 64}  # MiB of a core
NUM_TOKENS, NUM_SEQUENCES, MAX_BLOCKS = 256, 256, 512
POOL_BYTES = 2**30  # nothing is allocated; 5 % of it is more than any step's own temporaries


@functools.cache
def _mesh(chip: str) -> Mesh:
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs; `make test-compile` installs it")
    from jax.experimental import topologies

    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    return Mesh(np.array(topology.devices[:1]), ("model",))


def _pool(mesh, layout):
    num_blocks = POOL_BYTES // layout.bytes_per_block | 1  # odd: no other array has this many rows
    return pool_struct(layout, num_blocks, NamedSharding(mesh, P()))


def _compile(mesh, fn, *args, donate=(0,)):
    """`fn` as one device of a mesh runs it; `args` as (shape, dtype), or structs already."""
    sharding = NamedSharding(mesh, P())

    def struct(arg):
        return jax.ShapeDtypeStruct(*arg, sharding=sharding) if isinstance(arg, tuple) else arg

    sharded = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(sharded, donate_argnums=donate).lower(*map(struct, args)).compile()


def _metadata(mesh):
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P()))

    return AttentionMetadata(
        ints(NUM_SEQUENCES), ints(NUM_SEQUENCES + 1), ints(NUM_SEQUENCES, MAX_BLOCKS), ints(3), ints(NUM_TOKENS)
    )


def _faults(compiled, pool) -> list[str]:
    """What the gates have against a program that is given `pool` and returns it."""
    memory, faults = compiled.memory_analysis(), []
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in pool.arrays)
    if memory.alias_size_in_bytes < size:
        faults.append(f"alias: {memory.alias_size_in_bytes} of {size} bytes")
    if memory.temp_size_in_bytes > 0.05 * size:
        faults.append(f"temp: {memory.temp_size_in_bytes} bytes, the pool is {size}")
    for line in re.findall(r"^.* copy(?:-start)?\(.*$", compiled.as_text(), re.MULTILINE):
        shapes = re.findall(r"\[([\d,]+)\]", line.split(" copy")[0])  # of a copy-start, a tuple
        if any(math.prod(map(int, shape.split(","))) == pool.arrays[0].size for shape in shapes):
            faults.append(f"copy: {line.strip()[:100]}")
    return faults


def _vmem_used(compiled, kernel: str) -> int:
    """Bytes of VMEM that the compiler gave a kernel."""
    (call,) = re.findall(rf"%{kernel}\.\S* = .*custom_call.*", compiled.as_text())
    (size,) = re.findall(r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"0","size":"(\d+)"}', call)
    return int(size)


def _layer(pool, q, k, v, meta, *, head_dim, **options):
    pool = kv_write(pool, k, v, meta.slot_mapping, implementation="mosaic_tpu")
    return pool, ragged_paged_attention(q, pool, meta, sm_scale=head_dim**-0.5, implementation="mosaic_tpu", **options)


def _compile_layer(chip, layout, *, num_heads, q_dtype="bfloat16", donate=(0,), **options):
    """A layer's write and attention as one program, and the pool that it is given."""
    mesh = _mesh(chip)
    pool, meta = _pool(mesh, layout), _metadata(mesh)
    kv = (NUM_TOKENS, layout.num_kv_heads, layout.head_dim), q_dtype
    q = (NUM_TOKENS, num_heads, layout.head_dim), q_dtype
    layer = functools.partial(_layer, head_dim=layout.head_dim, **options)
    return _compile(mesh, layer, pool, q, kv, kv, meta, donate=donate), pool


# Head dim, dtype; the block size turns with them, so that each is met by each.
SHAPES = [
    (dim, dtype, (16, 64, 128)[(i + j) % 3])
    for i, dim in enumerate((64, 128, 256))
    for j, dtype in enumerate(("float32", "bfloat16", "int8", "float8_e4m3fn"))
]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("dim", "dtype", "block_size"), SHAPES)
def test_a_layer_compiles_and_leaves_the_pool_in_place(chip, dim, dtype, block_size):
    layout = PoolLayout(4, dim, block_size, dtype, "tpu")
    q_dtype = "float32" if dtype == "float32" else "bfloat16"
    assert not _faults(*_compile_layer(chip, layout, num_heads=16, q_dtype=q_dtype))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "options"),
    [
        (9, 3, 64, "bfloat16", dict(return_lse=True)),  # SmolLM2: odd heads, padded rows
        (32, 8, 128, "bfloat16", dict(sliding_window=1024, soft_cap=30.0)),
        (8, 8, 128, "bfloat16", {}),  # a head of its own for every query head
        (8, 1, 80, "int8", {}),
    ],
)
def test_what_models_ask_for_compiles(chip, heads, kv_heads, dim, dtype, options):
    layout = PoolLayout(kv_heads, dim, 16, dtype, "tpu")
    compiled, pool = _compile_layer(chip, layout, num_heads=heads, **options)
    assert not _faults(compiled, pool)
    used = {name: _vmem_used(compiled, name) for name in ("ragged_paged_attention", "kv_write")}
    print(f"{chip} {heads}/{kv_heads}/{dim} {dtype}: {used} bytes of VMEM")  # `-rP` shows it
    share = 0.75 if not options.get("return_lse") else 1  # its buffers come on top of what the tiles were chosen for
    assert 2**20 < used["ragged_paged_attention"] <= share * VMEM[chip] * 2**20 and used["kv_write"] == 0


def test_a_ring_of_more_buffers_is_seen_by_its_vmem():
    tiles = default_tpu_tiles(BFLOAT16, 4, 2, VMEM["v4"] * 2**20)
    compiled, _ = _compile_layer("v4", BFLOAT16, num_heads=32, tiles=dataclasses.replace(tiles, buffers=3))
    assert _vmem_used(compiled, "ragged_paged_attention") > 0.75 * VMEM["v4"] * 2**20


@pytest.mark.parametrize("chip", CHIPS)
def test_sinks_and_scales_compile(chip):
    mesh, layout = _mesh(chip), PoolLayout(4, 64, 32, "int8", "tpu")
    pool, meta, q = _pool(mesh, layout), _metadata(mesh), ((NUM_TOKENS, 32, 64), "bfloat16")

    def attend(pool, q, meta, sinks, k_scale, v_scale):
        scales = dict(k_scale=k_scale, v_scale=v_scale)
        return pool, ragged_paged_attention(
            q, pool, meta, sm_scale=0.125, sinks=sinks, implementation="mosaic_tpu", **scales
        )

    scale = (4,), "float32"
    assert not _faults(_compile(mesh, attend, pool, q, meta, ((32,), "float32"), scale, scale), pool)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_copy_blocks_compiles_and_leaves_the_pool_in_place(chip, dtype):
    mesh, layout = _mesh(chip), PoolLayout(8, 128, 16, dtype, "tpu")
    pool = _pool(mesh, layout)
    copy = functools.partial(copy_blocks, implementation="mosaic_tpu")
    ids = (64,), "int32"
    compiled = _compile(mesh, lambda pool, *args: copy((pool,), *args)[0], pool, ids, ids, ((), "int32"))
    assert not _faults(compiled, pool)


BFLOAT16 = PoolLayout(8, 128, 16, "bfloat16", "tpu")


def test_without_donation_the_gates_see_that_nothing_is_aliased():
    faults = _faults(*_compile_layer("v6e", BFLOAT16, num_heads=32, donate=()))
    assert any(fault.startswith("alias") for fault in faults), faults


def test_a_kernel_without_aliases_is_seen_by_its_temporary_pool(monkeypatch):
    shim = types.SimpleNamespace(**vars(kv_write_module.pl))
    original = kv_write_module.pl.pallas_call
    shim.pallas_call = lambda *args, input_output_aliases, **kwargs: original(*args, **kwargs)
    monkeypatch.setattr(kv_write_module, "pl", shim)
    faults = _faults(*_compile_layer("v6e", BFLOAT16, num_heads=32))
    assert any(fault.startswith("temp") for fault in faults), faults


def test_a_pool_of_another_form_is_seen_by_its_copies():
    """Rows of six in a tile of eight: XLA gives such an array another layout than a kernel wants."""
    mesh = _mesh("v6e")
    pool = _pool(mesh, dataclasses.replace(BFLOAT16, num_kv_heads=3, dtype="float32"))
    flat = jax.ShapeDtypeStruct((*pool.arrays[0].shape[:2], 6, 128), jnp.float32, sharding=NamedSharding(mesh, P()))
    other = dataclasses.replace(pool, arrays=(flat,))

    def layer(other, k, v, slots):
        again = dataclasses.replace(other, arrays=(other.arrays[0][:, :, :, None],))
        written = kv_write(again, k, v, slots, implementation="mosaic_tpu")
        return dataclasses.replace(written, arrays=(written.arrays[0][:, :, :, 0],))

    kv = (NUM_TOKENS, 3, 128), "float32"
    faults = _faults(_compile(mesh, layer, other, kv, kv, ((NUM_TOKENS,), "int32")), other)
    assert any(fault.startswith("copy") for fault in faults), faults
