"""The Hopper kernels compiled for the H200: what its compiler says of them. `-m compile -s` shows the table."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from ptx import bf16, compile_for_h200, i32

from pallas_kernels import AttentionMetadata, PoolLayout, kv_write, pool_struct, ragged_paged_attention
from pallas_kernels.paged_attention.mosaic_gpu import ragged_paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.tiles_gpu import SMS, default_gpu_tiles

pytestmark = pytest.mark.compile

NUM_BLOCKS, MAX_SEQUENCES, MAX_BLOCKS, NUM_TOKENS = 4096, 64, 128, 256
IN_FLIGHT = 36_000  # bytes an SM needs on their way to draw its share of 4.8 TB/s at 1 us


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention layer of a model, on one device."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"
    options: tuple[tuple[str, float], ...] = ()
    with_sinks: bool = False

    @property
    def layout(self) -> PoolLayout:
        return PoolLayout(self.num_kv_heads, self.head_dim, self.block_size, self.dtype, "gpu")

    @property
    def tiles(self):
        window = dict(self.options).get("sliding_window")
        return default_gpu_tiles(self.layout, self.num_heads // self.num_kv_heads, window)

    def structs(self):
        """Arguments of `step`."""
        kv = bf16(NUM_TOKENS, self.num_kv_heads, self.head_dim)
        meta = AttentionMetadata(
            i32(MAX_SEQUENCES), i32(MAX_SEQUENCES + 1), i32(MAX_SEQUENCES, MAX_BLOCKS), i32(3), i32(NUM_TOKENS)
        )
        sinks = jax.ShapeDtypeStruct((self.num_heads,), jnp.float32)
        q = bf16(NUM_TOKENS, self.num_heads, self.head_dim)
        return pool_struct(self.layout, NUM_BLOCKS), q, kv, kv, meta, sinks

    def step(self, pool, q, k, v, meta, sinks):
        pool = kv_write(pool, k, v, meta.slot_mapping)
        return pool, ragged_paged_attention(
            q, pool, meta, sm_scale=self.head_dim**-0.5, sinks=sinks if self.with_sinks else None, **dict(self.options)
        )


LAYERS = [
    Layer("8B", 32, 8, 128),
    Layer("8B_one_of_8", 4, 1, 128),
    Layer("8B_block_64", 32, 8, 128, block_size=64),
    Layer("SmolLM2", 9, 3, 64),
    Layer("window_and_sinks", 64, 8, 64, options=(("sliding_window", 128),), with_sinks=True),
    Layer("window_and_cap", 16, 8, 128, block_size=32, options=(("sliding_window", 4096), ("soft_cap", 50.0))),
    Layer("multi_head", 16, 16, 128),
    Layer("head_dim_192", 32, 8, 192),
    Layer("head_dim_256", 16, 8, 256),
    Layer("int8", 32, 8, 128, dtype="int8"),
    Layer("float8", 32, 8, 128, dtype="float8_e4m3fn"),
]


@functools.cache
def compiled(layer: Layer, donate: bool = True):
    return compile_for_h200(layer.step, *layer.structs(), donate_argnums=(0,) if donate else ())


def copies_of_the_pool(program, layer: Layer) -> list[str]:
    """Lines of HLO, cut short: a kernel's own text is in some."""
    shape = "[" + ",".join(map(str, layer.layout.shapes(NUM_BLOCKS)[0])) + "]"
    heads = (line.strip()[:200] for line in program.text.splitlines())
    return [head for head in heads if shape in head and re.search(r" copy(-start)?\(", head)]


def bytes_in_flight(kernel, layer: Layer, stages: int) -> int:
    """On one SM: a stage is what one turn of the producer's loop loads."""
    assert layer.tiles.tile_kv % layer.block_size == 0
    return kernel.ctas_per_sm * stages * sum(kernel.loads)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_kernels_of_a_layer(layer):
    program, kernels = compiled(layer)
    assert set(kernels) == {"paged_decode", "paged_combine", "paged_prefill"}
    for kernel in kernels.values():
        assert kernel.spilled_bytes == 0 and not kernel.warnings, (kernel.name, kernel.warnings)
    decode, prefill = kernels["paged_decode"], kernels["paged_prefill"]
    for kernel, tile_kv in ((decode, layer.tiles.tile_kv), (prefill, layer.tiles.prefill_tile_kv)):
        assert kernel.count("wgmma.mma_async") and kernel.count("cp.async.bulk.tensor")
        box = layer.layout.storage_dtype.itemsize * layer.block_size * layer.head_dim
        assert kernel.loads == kernel.expected == (box,) * (2 * tile_kv // layer.block_size)
    rows = -(-layer.num_heads // layer.num_kv_heads // 8) * 8
    assert {(m, n) for m, n, _ in decode.products} == {(64, rows)}
    assert decode.ctas_per_sm == layer.tiles.ctas // SMS
    in_flight = bytes_in_flight(decode, layer, layer.tiles.stages)
    assert in_flight > IN_FLIGHT
    for kernel in kernels.values():
        print(
            f"{layer.name:18}{kernel.name:16}{kernel.registers:4} registers {kernel.smem:7} bytes of smem"
            f" {kernel.ctas_per_sm:2} CTAs/SM {kernel.instructions:5} PTX instructions"
            + (f" {in_flight:7} bytes in flight/SM, {rows} FLOP a KV byte" if kernel is decode else "")
        )


@pytest.mark.parametrize("layer", LAYERS[:2], ids=lambda layer: layer.name)
def test_the_pool_is_written_in_place_and_never_copied(layer):
    """XLA's scatter does for kv_write on GPU."""
    program, _ = compiled(layer)
    pool_bytes = NUM_BLOCKS * layer.layout.bytes_per_block
    assert program.alias_bytes == pool_bytes
    assert not copies_of_the_pool(program, layer)
    print(f"{layer.name}: pool {pool_bytes}, temporary {program.temp_bytes}")


def test_the_gates_see_what_they_should():
    """Each gate on a program that is wrong on purpose."""
    layer = LAYERS[0]
    program, _ = compiled(layer, donate=False)
    assert program.alias_bytes == 0 and copies_of_the_pool(program, layer)
    greedy = dataclasses.replace(layer.tiles, stages=6, prefill_tile_kv=256, prefill_stages=1)

    pool, q, _, _, meta, sinks = layer.structs()
    attend = functools.partial(
        ragged_paged_attention_mosaic_gpu,
        sm_scale=1.0, sliding_window=None, soft_cap=None, k_scale=None, v_scale=None, return_lse=False, tiles=greedy,
    )  # fmt: skip
    _, kernels = compile_for_h200(functools.partial(with_sinks, attend), q, pool, meta, sinks)
    assert kernels["paged_decode"].ctas_per_sm == 1
    assert kernels["paged_prefill"].spilled_bytes > 0 and kernels["paged_prefill"].warnings


def with_sinks(attend, q, pool, meta, sinks):
    return attend(q, pool, meta, sinks=sinks)


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[5]], ids=lambda layer: layer.name)
def test_paging_costs_few_instructions(layer):
    """The kernels against themselves with blocks that lie in order and are not looked up."""
    pool, q, _, _, meta, _ = layer.structs()
    options = {"sliding_window": None, "soft_cap": None} | dict(layer.options)

    def instructions(contiguous: bool) -> dict[str, int]:
        attend = functools.partial(
            ragged_paged_attention_mosaic_gpu, sm_scale=0.1, sinks=None, k_scale=None, v_scale=None, return_lse=False,
            contiguous=contiguous, **options,
        )  # fmt: skip
        _, kernels = compile_for_h200(attend, q, pool, meta)
        return {name: kernels[name].instructions for name in ("paged_decode", "paged_prefill")}

    paged, contiguous = instructions(False), instructions(True)
    for name, count in paged.items():
        print(f"PTX instructions of {name}: {count}, contiguous {contiguous[name]}, ratio {count / contiguous[name]:.3f}")
        assert count <= 1.03 * contiguous[name]
