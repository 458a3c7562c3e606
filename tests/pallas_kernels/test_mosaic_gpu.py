"""The Hopper kernels, in the interpreter, against the float64 reference.

The interpreter takes 10 to 40 seconds a case, most of it to trace and compile itself: three cases that use all that the
kernels can stand for the rest, which are marked `slow` (`pytest -m slow`).
"""

import dataclasses
import itertools
import math
import types

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, MIXED, Case, hide_all_but_first_blocks, make_step
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # no public way to the races found, or to reset

from pallas_kernels import LayerPool, PoolLayout, ragged_paged_attention
from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_producer
from pallas_kernels.paged_attention.mosaic_gpu import ragged_paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu_plan import partitions, row_tiles
from pallas_kernels.paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.paged_attention.tiles_gpu import SMEM_PER_CTA, GpuTiles, default_gpu_tiles

pytestmark = pytest.mark.long  # interpreters take seconds a program

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
NO_OPTIONS = dict(sliding_window=None, soft_cap=None, sinks=None, k_scale=None, v_scale=None, return_lse=True)
REFUSED = ("group_4_block_64",)  # of head_dim 80
FAST = ("one_sequence", "everything", "three_kv_heads")


def on_gpu(case: Case) -> Case:
    """The case in the kernels' form; float32 becomes bfloat16, the only numbers that both wgmma and they take."""
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    return dataclasses.replace(case, form="gpu", dtype=dtype, q_dtype="bfloat16")


def small_tiles(block_size: int, **more) -> GpuTiles:
    """Few CTAs, so that each has several items, and partitions that split every long sequence."""
    tile = math.lcm(64, block_size)
    tiles = GpuTiles(
        partition=2 * tile, tile_kv=tile, stages=2, tokens=1, ctas=3, partial_bytes=1 << 20, prefill_tile_kv=tile,
        prefill_stages=2, prefill_consumers=2, prefill_ctas=2,
    )  # fmt: skip
    return dataclasses.replace(tiles, **more)


def run(step, tiles: GpuTiles, **more):
    kwargs = NO_OPTIONS | step.kwargs | more
    try:
        out, lse = jax.block_until_ready(
            ragged_paged_attention_mosaic_gpu(
                step.q, step.pool, step.meta, tiles=tiles, interpret=INTERPRET, **kwargs
            )
        )
        assert not gpu_callbacks.get_races().races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


def check(step, tiles: GpuTiles) -> None:
    agrees(step, *run(step, tiles))


def agrees(step, out, lse) -> None:
    want, want_lse = ragged_paged_attention_reference(step.q, step.pool, step.meta, **step.kwargs)
    # Weights are rounded to bfloat16 for the second product, as the output is: 2**-9 each, of values up to 3 or so.
    np.testing.assert_allclose(out, want, rtol=8e-3, atol=8e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in FAST else pytest.mark.slow)
        for case in CASES
        if case.name not in REFUSED
    ],
    ids=lambda case: case.name,
)
def test_agrees_with_float64(case):
    consumers = 1 if case.dtype in ("int8", "float8_e4m3fn") else 2
    check(make_step(on_gpu(case)), small_tiles(case.block_size, prefill_consumers=consumers))


@pytest.mark.slow  # as long as any case
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_agrees_with_float64_whatever_the_tiles(head_dim):
    """Several verified tokens a CTA, one consumer, and partitions that double because partial results have no room.

    The block tables have no column to spare.
    """
    case = on_gpu(Case("tiles", **MIXED, num_heads=10, num_kv_heads=1, head_dim=head_dim))
    step = make_step(case)
    tables = step.meta.block_tables[:, :13]  # 200 positions
    step = dataclasses.replace(step, meta=dataclasses.replace(step.meta, block_tables=tables))
    check(step, small_tiles(16, tokens=3, partition=64, partial_bytes=0, prefill_consumers=1))


@pytest.mark.slow
def test_contiguous_blocks_are_found_without_the_rest_of_the_table():
    step = make_step(on_gpu(Case("contiguous", decode=(150,), prefill=((40, 100),))), placement=None)
    agrees(step, *run(hide_all_but_first_blocks(step), small_tiles(16), contiguous=True))


@pytest.mark.slow  # three runs
def test_neighbours_and_splits_change_no_bit_of_a_decoded_row():
    case = on_gpu(Case("crowd", decode=(150, 90, 31)))
    step = make_step(case)
    alone = dataclasses.replace(
        step,
        q=step.q[:1],
        meta=dataclasses.replace(
            step.meta,
            query_start_loc=jnp.minimum(step.meta.query_start_loc, 1),
            distribution=jnp.asarray([1, 1, 1], jnp.int32),
        ),
    )
    verified = dataclasses.replace(
        step, meta=dataclasses.replace(step.meta, distribution=jnp.asarray([0, 3, 3], jnp.int32))
    )
    tiles = small_tiles(16, partition=64)
    crowd, crowd_lse = run(step, tiles)
    for other, rows in ((alone, 1), (verified, 3)):
        out, lse = run(other, tiles)
        np.testing.assert_array_equal(out[:rows], crowd[:rows])
        np.testing.assert_array_equal(lse[:rows], crowd_lse[:rows])


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_and_says_why(name):
    step = make_step(on_gpu(next(case for case in CASES if case.name == name)))
    with pytest.raises(NotImplementedError, match=f"head_dim of 64, 128, 192 or 256, got {step.pool.head_dim}"):
        ragged_paged_attention(step.q, step.pool, step.meta, implementation="mosaic_gpu", **step.kwargs)
    out = ragged_paged_attention(step.q, step.pool, step.meta, **step.kwargs)  # XLA takes its place
    want, _ = ragged_paged_attention_reference(step.q, step.pool, step.meta, **step.kwargs)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), want, rtol=8e-3, atol=8e-3)


def test_refuses_float32_and_blocks_that_tma_cannot_tile():
    for case in (Case("q", decode=(5,), form="gpu"), on_gpu(Case("block", decode=(5,), block_size=4))):
        step = make_step(case)
        with pytest.raises(NotImplementedError, match="needs q in bfloat16.*got float32|multiple of 8, got 4"):
            ragged_paged_attention(step.q, step.pool, step.meta, implementation="mosaic_gpu", **step.kwargs)


def test_default_tiles_suit_the_pool():
    dims, sizes, groups, windows = (64, 128, 192, 256), (8, 16, 32, 64, 128), (1, 4, 8, 16), (None, 100)
    for dim, size, group, window in itertools.product(dims, sizes, groups, windows):
        if dim * size > 128 * 128:
            continue
        tiles = default_gpu_tiles(PoolLayout(8, dim, size, "bfloat16", "gpu"), group, window)
        assert tiles.tile_kv % 64 == tiles.tile_kv % size == tiles.partition % tiles.tile_kv == 0
        assert tiles.prefill_tile_kv % 64 == tiles.prefill_tile_kv % size == 0
        for tile_kv, stages in ((tiles.tile_kv, tiles.stages), (tiles.prefill_tile_kv, tiles.prefill_stages)):
            assert stages >= 2 and 4 * tile_kv * dim * stages < SMEM_PER_CTA


def test_default_tiles_refuse_blocks_that_fill_shared_memory():
    with pytest.raises(NotImplementedError, match="block_size = 256 is too much at head_dim = 128"):
        default_gpu_tiles(PoolLayout(8, 128, 256, "bfloat16", "gpu"), 4, None)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("capacity", [64, 11])
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_work_lists_cover_every_query_and_its_kv_once(tokens, capacity, window):
    step = make_step(Case("plan", **MIXED))
    num_decoded = 2
    lens = [length for _, length in Case("", **MIXED).sequences]
    counts = [count for count, _ in Case("", **MIXED).sequences]
    tiles = row_tiles(step.meta, num_decoded, len(counts), len(step.q), tokens)
    covered = []
    for i in range(int(tiles.count)):
        s, first, size = int(tiles.sequence[i]), int(tiles.token[i]), int(tiles.tokens[i])
        assert 0 < size <= tokens
        offset = first - int(step.meta.query_start_loc[s])
        assert int(tiles.position[i]) == lens[s] - counts[s] + offset
        covered += range(first, first + size)
    assert covered == list(range(sum(counts[:num_decoded]), sum(counts)))
    capacity = max(capacity, len(tiles.tokens))
    parts = partitions(tiles, window, 32, capacity)
    assert int(parts.count) <= capacity
    for i in range(int(tiles.count)):
        mine = range(int(parts.first[i]), int(parts.last[i]))
        assert all(int(parts.tile[w]) == i for w in mine)
        begins, ends = [int(parts.begin[w]) for w in mine], [int(parts.end[w]) for w in mine]
        position, size = int(tiles.position[i]), int(tiles.tokens[i])
        assert begins[0] == (0 if window is None else max(0, position - window + 1))
        assert ends[-1] == position + size and begins[1:] == ends[:-1]
        assert all(end % 32 == 0 for end in ends[:-1])


def _one_item_of_decode():
    """The smallest decode: one sequence of 200 tokens, four tiles through two stages."""
    step = make_step(on_gpu(Case("tiny", decode=(200,), num_heads=8, num_kv_heads=1)))
    shape = mosaic_gpu_decode.DecodeShape(
        num_kv_heads=1, group=8, rows_per_token=8, tokens=1, head_dim=64, block_size=16, tile_kv=64, stages=2, ctas=1,
        window=None, soft_cap=None, interpret=True, is_contiguous=False,
    )  # fmt: skip
    items = jnp.asarray([[0], [0], [199], [0], [200]], jnp.int32)
    try:
        acc, ml = jax.block_until_ready(
            mosaic_gpu_decode.decode_partials(
                shape, step.q, step.pool.arrays[0], step.meta.block_tables, items, jnp.ones(1, jnp.int32),
                jnp.full(1, step.kwargs["sm_scale"] * math.log2(math.e)), capacity=1, interpret=INTERPRET,
            )
        )  # fmt: skip
        raced = gpu_callbacks.get_races().races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    want, _ = ragged_paged_attention_reference(step.q, step.pool, step.meta, **step.kwargs)
    return raced, np.allclose(np.asarray(acc[0, 0] / ml[0, 0, 1]).T, want[0], rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("removed", [None, "free", "keys", "values"])
def test_a_removed_wait_is_caught(removed, monkeypatch):
    """A test of the other tests: they see what a kernel with one wait too few does."""
    traced = []

    def barrier_wait(barrier):
        traced.append(barrier)
        if removed is None or len(traced) - 1 != ("free", "keys", "values").index(removed):
            plgpu.barrier_wait(barrier)

    patched = types.SimpleNamespace(**(vars(plgpu) | {"barrier_wait": barrier_wait}))
    for module in (mosaic_gpu_decode, mosaic_gpu_producer):
        monkeypatch.setattr(module, "plgpu", patched)
    try:
        raced, agrees = _one_item_of_decode()
        caught = raced or not agrees
    except Exception:  # the interpreter's own, of a type that differs from version to version
        caught = True
    assert len(traced) == 3, "the kernel's waits, in the order of the text"
    assert caught == (removed is not None)


@pytest.mark.slow
def test_the_shards_of_any_mesh_give_the_bits_of_one_device():
    """Shard by shard on one device: of several, the interpreter counts the barriers together, and one that ends complains of
    the others'. tests/compile has the step on a mesh of eight."""
    step = make_step(on_gpu(Case("shards", decode=(40, 20), prefill=((20, 36),), num_heads=16, num_kv_heads=8)))
    kwargs = NO_OPTIONS | step.kwargs | dict(tiles=small_tiles(16, ctas=2), interpret=INTERPRET)
    outs = []
    for size in (1, 2, 4, 8):
        layout = dataclasses.replace(step.pool.shard, num_shards=size)
        queries, arrays = jnp.split(step.q, size, 1), jnp.split(step.pool.arrays[0], size, layout.sharded_axis)
        shards = [
            ragged_paged_attention_mosaic_gpu(q, LayerPool((array,), layout.shard), step.meta, **kwargs)
            for q, array in zip(queries, arrays)
        ]
        outs.append([np.concatenate([np.asarray(x.astype(jnp.float32)) for x in parts], 1) for parts in zip(*shards)])
    for others in outs[1:]:
        for one, other in zip(outs[0], others):
            np.testing.assert_array_equal(one, other)
