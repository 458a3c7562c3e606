"""The TPU kernels in the interpreter: right numbers, no race, exact copies.

Both ways of running DMA are needed: "on_wait" lets a copy happen only when it is waited for, so that a missing wait
leaves NaN; "eager" lets it happen at once, and reports the missing wait as a race, which raises. The interpreter takes
5 to 20 s to build each program, so most combinations are marked slow; those left touch every path of the kernels.
"""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, MIXED, Case, hide_all_but_first_blocks, make_step
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret.utils import to_range
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import PoolLayout, TpuTiles, copy_blocks, default_tpu_tiles, kv_write, ragged_paged_attention
from pallas_kernels.block_copy.mosaic_tpu import copy_blocks_mosaic_tpu
from pallas_kernels.kv_write.mosaic_tpu import kv_write_mosaic_tpu
from pallas_kernels.paged_attention import mosaic_tpu_kernel
from pallas_kernels.paged_attention.mosaic_tpu import ragged_paged_attention_mosaic_tpu
from pallas_kernels.paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.pool import logical_kv, pool_from_logical

pytestmark = pytest.mark.long  # interpreters take seconds a program

MODES = ("on_wait", "eager")
# Small, so that sequences of the cases' lengths take several fetches, several products a fetch and several strips.
TILES = TpuTiles(
    fetch=256, buffers=3, decode_kv=128, prefill_kv=128, verify_q=8, prefill_q=32, strip=16, vmem_bytes=2**24
)
STATIC = ("sm_scale", "sliding_window", "soft_cap", "return_lse", "tiles", "contiguous", "interpret")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # reason: see the module's docstring


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter keeps its state, and the next kernel would find it."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def _interpret(mode):
    return pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", dma_execution_mode=mode
    )


def _attend(step, mode="on_wait", tiles=TILES, **more):
    def attend(q, pool, meta, **kwargs):  # its own program, whatever was patched for the one before
        return ragged_paged_attention_mosaic_tpu(q, pool, meta, **kwargs)

    run = jax.jit(attend, static_argnames=STATIC)
    kwargs = {"return_lse": True, **step.kwargs, **more}
    out, lse = run(step.q, step.pool, step.meta, tiles=tiles, interpret=_interpret(mode), **kwargs)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


def _check(step, got, q_dtype="float32"):
    want, want_lse = ragged_paged_attention_reference(step.q, step.pool, step.meta, **step.kwargs)
    # float32 sums in another order; bfloat16 weights and results are rounded to 8 bits.
    tolerance = 4e-6 if q_dtype == "float32" else 8e-3
    np.testing.assert_allclose(got[0], want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got[1], want_lse, rtol=4e-6, atol=4e-6)


OWN_CASES = [
    Case("head_dim_128_bfloat16", **MIXED, head_dim=128, num_heads=6, num_kv_heads=3, dtype="bfloat16"),
    Case(
        "head_dim_128_int8",
        **MIXED,
        head_dim=128,
        num_heads=6,
        num_kv_heads=3,
        dtype="int8",
        q_dtype="bfloat16",
        with_scales=True,
    ),
    Case("head_dim_128_fp8", **MIXED, head_dim=128, dtype="float8_e4m3fn", with_scales=True),
    Case("head_dim_160_bfloat16", **MIXED, head_dim=160, num_kv_heads=1, dtype="bfloat16", q_dtype="bfloat16"),
    Case("block_256", **MIXED, block_size=256),
]
# Between them: both ways of multiplying, window, cap, sinks, scales, a packed and an unpacked head, one and two words a
# token, odd and even groups, float32 and bfloat16 products.
QUICK = {("everything", "on_wait"), ("everything", "eager"), ("head_dim_128_int8", "eager")}


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (pytest.param if (case.name, mode) in QUICK else slow)(case, mode, id=f"{case.name}-{mode}")
        for case in CASES + OWN_CASES
        for mode in MODES
    ],
)
def test_agrees_with_float64(case, mode):
    step = make_step(dataclasses.replace(case, form="tpu"))
    _check(step, _attend(step, mode), case.q_dtype)


@pytest.mark.slow  # one more program of the interpreter each
@pytest.mark.parametrize(
    "tiles",
    [
        dict(buffers=2, fetch=128),
        dict(buffers=8, fetch=512, decode_kv=256, prefill_kv=512),
        dict(prefill_q=128, strip=64, verify_q=16),
    ],
)
def test_tiles_change_no_number_beyond_rounding(tiles):
    step = make_step(Case("tiled", **MIXED, form="tpu", options=(("sliding_window", 70),)))
    _check(step, _attend(step, tiles=dataclasses.replace(TILES, **tiles)))


@pytest.mark.slow  # as above
def test_contiguous_blocks_are_found_without_the_rest_of_the_table():
    step = make_step(Case("contiguous", **MIXED, form="tpu"), placement=None)
    _check(step, _attend(hide_all_but_first_blocks(step), contiguous=True))


def test_neighbours_placement_poison_and_chunks_change_nothing():
    """One program: every step here has the same shapes."""
    run = jax.jit(
        functools.partial(ragged_paged_attention_mosaic_tpu, sm_scale=0.125, tiles=TILES), static_argnames="interpret"
    )
    case = Case("whole", prefill=((100, 100),), form="tpu")

    def attend(step, q=None, **meta):
        meta = dataclasses.replace(step.meta, **{name: jnp.asarray(x, jnp.int32) for name, x in meta.items()})
        return np.asarray(run(step.q if q is None else q, step.pool, meta, interpret=_interpret("on_wait")))

    step = make_step(case)
    whole = attend(step)
    for other in (make_step(case, placement=1), make_step(case, poison=False)):
        np.testing.assert_array_equal(attend(other), whole)
    for start, end in ((0, 37), (37, 99), (99, 100)):
        starts, lens = np.full(13, end - start), np.full(12, 7)
        starts[0], lens[0] = 0, end
        q = jnp.zeros_like(step.q).at[: end - start].set(step.q[start:end])
        chunk = attend(step, q, query_start_loc=starts, seq_lens=lens)
        np.testing.assert_array_equal(chunk[: end - start], whole[start:end])
        assert not chunk[end - start :].any()
        # The last token again, decoded and verified in its chunk's place.
        if end - start == 1:
            for ranges in ((1, 1, 1), (0, 1, 1)):
                alone = attend(step, q, query_start_loc=starts, seq_lens=lens, distribution=ranges)
                np.testing.assert_allclose(alone[0], whole[99], rtol=4e-6, atol=4e-6)


@pytest.fixture
def copies(monkeypatch):
    """(source, target) of each copy that the interpreter is asked for, as ranges: what the kernel's DMAs move."""
    seen = []
    original = interpreter.DMA

    def dma(*args, **kwargs):
        seen.append((to_range(args[5]), to_range(args[10])))
        return original(*args, **kwargs)

    monkeypatch.setattr(interpreter, "DMA", dma)
    return seen


def test_copies_each_block_that_is_seen_once(copies):
    """Bytes moved over bytes needed, the last block rounded up, are 1: no block twice, none that no query sees."""
    window = 50
    step = make_step(
        Case("few", decode=(1, 16, 17, 300), verify=((4, 90),), prefill=((100, 200), (5, 5)), form="tpu",
             options=(("sliding_window", window),))
    )  # fmt: skip
    _check(step, _attend(step))
    tables, lens, starts = (
        np.asarray(x) for x in (step.meta.block_tables, step.meta.seq_lens, step.meta.query_start_loc)
    )
    needed = []
    for s in range(int(step.meta.distribution[2])):
        first = max(0, lens[s] - (starts[s + 1] - starts[s]) - window + 1) // 16
        needed += tables[s, first : -(-lens[s] // 16)].tolist()
    to_buffers = [s for s, t in copies if len(s) == 5 and isinstance(s[0], int) and isinstance(t[0], int)]
    assert sorted(source[0] for source in to_buffers) == sorted(needed)


def _fails(step, mode) -> bool:
    try:
        _check(step, _attend(step, mode))
    except (AssertionError, RuntimeError):  # JaxRuntimeError is one
        return True
    return False


# Not _wait_out with "on_wait": a copy that nobody waits for never happens then, and the interpreter waits for it at its
# end, for ever.
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wait", "mode"),
    [
        slow("_wait_kv", "on_wait"),
        ("_wait_kv", "eager"),
        slow("_wait_q", "on_wait"),
        slow("_wait_q", "eager"),
        slow("_wait_out", "eager"),
    ],
)
def test_a_missing_wait_is_seen(monkeypatch, wait, mode):
    """Of these tests: without one of the kernel's waits they fail."""
    monkeypatch.setattr(mosaic_tpu_kernel._Pipeline, wait, lambda *_: None)
    assert _fails(make_step(Case("short", decode=(20, 30, 40, 300), form="tpu")), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_kv_write_puts_tokens_where_the_reference_does(dtype, mode):
    layout = PoolLayout(3, 64, 16, dtype, "tpu")
    rng = np.random.default_rng(0)
    pool = pool_from_logical(*rng.integers(-9, 9, (2, 9, 16, 3, 64)).astype(np.float64), layout)
    k, v = jnp.asarray(4 * rng.standard_normal((2, 37, 3, 64)), jnp.float32)
    # Alone, in runs across blocks, in runs that only look like one, and padding.
    slots = jnp.asarray(
        [20, *range(40, 60), 22, 100, 70, 102, 71, 104, 105, 106, 107, *range(128, 133), 0, 0, 0, 0][:37]
    )
    scales = (None, None) if dtype in ("float32", "bfloat16") else (jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray(0.2))
    write = jax.jit(functools.partial(kv_write_mosaic_tpu, interpret=_interpret(mode)))
    got = logical_kv(write(pool, k, v, slots, *scales))
    want = logical_kv(kv_write(pool, k, v, slots, k_scale=scales[0], v_scale=scales[1], implementation="reference"))
    for numbers, expected in zip(got, want):
        np.testing.assert_array_equal(numbers[1:], expected[1:])


def test_kv_write_moves_each_token_once_and_of_the_padding_one(copies):
    """Slots are moved, never whole blocks: one token of a decode step, runs of a chunk of prefill."""
    layout = PoolLayout(3, 64, 16, "bfloat16", "tpu")
    pool = pool_from_logical(*np.zeros((2, 9, 16, 3, 64)), layout)
    slots = [20, *range(43, 60), 22, 100, 70, *range(128, 136), 0, 0, 0]
    k = jnp.ones((len(slots), 3, 64))
    jax.jit(functools.partial(kv_write_mosaic_tpu, interpret=_interpret("eager")))(
        pool, k, k, jnp.asarray(slots), None, None
    )
    moved = [block * 16 + slot for _, (block, at, *_) in copies for slot in range(at.start, at.stop)]
    assert sorted(moved) == sorted(set(slots))
    assert len(copies) < len(moved)  # of a chunk, several tokens at once


@pytest.mark.parametrize("mode", [slow("on_wait"), "eager"])
def test_tokens_just_written_are_attended_to(mode):
    """Writes, then attends, in one program, as a layer does."""
    case = Case("layer", decode=(17, 40), prefill=((20, 36),), dtype="bfloat16", form="tpu")
    step = make_step(case)
    tables, lens, starts = (
        np.asarray(x) for x in (step.meta.block_tables, step.meta.seq_lens, step.meta.query_start_loc)
    )
    slots = np.concatenate(
        [
            tables[s][(at := np.arange(lens[s] - (starts[s + 1] - starts[s]), lens[s])) // 16] * 16 + at % 16
            for s in range(3)
        ]
    )
    k, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 22, 2, 64)), jnp.float32)

    @jax.jit
    def layer(pool, q, k, v, meta, slots):
        pool = kv_write_mosaic_tpu(pool, k, v, slots, None, None, interpret=_interpret(mode))
        return ragged_paged_attention_mosaic_tpu(
            q, pool, meta, return_lse=True, tiles=TILES, interpret=_interpret(mode), **step.kwargs
        )

    got = layer(step.pool, step.q, k, v, step.meta, jnp.asarray(slots, jnp.int32))
    after = kv_write(step.pool, k, v, jnp.asarray(slots), implementation="reference")
    _check(dataclasses.replace(step, pool=after), [np.asarray(x) for x in got])


@pytest.mark.parametrize("mode", MODES)
def test_copy_blocks_copies_every_layer_of_every_pool(mode):
    layout = PoolLayout(3, 64, 16, "bfloat16", "tpu")
    rng = np.random.default_rng(0)
    pools = tuple(
        pool_from_logical(*rng.integers(-9, 9, (2, count, 16, 3, 64)).astype(np.float64), layout) for count in (18, 27)
    )
    src, dst = jnp.asarray([1, 2, 3, 0]), jnp.asarray([5, 6, 7, 0])
    run = jax.jit(functools.partial(copy_blocks_mosaic_tpu, blocks_per_layer=9, interpret=_interpret(mode)))
    for num in (0, 3):
        got = run(pools, src, dst, num)
        want = copy_blocks(pools, src, dst, num, blocks_per_layer=9, implementation="reference")
        for ours, theirs in zip(got, want):
            np.testing.assert_array_equal(logical_kv(ours), logical_kv(theirs))


SHARDED = """
import dataclasses, functools, sys
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
sys.path.insert(0, sys.argv[1])
from attention_cases import Case, make_step
from test_mosaic_tpu import TILES, _check, _interpret
from pallas_kernels.paged_attention.mosaic_tpu import ragged_paged_attention_mosaic_tpu

case = Case("sharded", decode=(17, 40), prefill=((20, 36),), num_heads=16, num_kv_heads=8, form="tpu")
step = make_step(case)
for size in (1, 2, 4, 8):
    layout = dataclasses.replace(step.pool.shard, num_kv_heads=8, num_shards=size)
    pool = dataclasses.replace(step.pool, shard=layout.shard)  # float32: no shard pads its rows
    attend = functools.partial(
        ragged_paged_attention_mosaic_tpu, return_lse=True, tiles=TILES, interpret=_interpret("on_wait"), **step.kwargs
    )
    mesh = Mesh(np.array(jax.devices()[:size]), ("model",))
    heads, kv_heads = P(None, "model"), layout.partition_spec("model")
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, kv_heads, P()), out_specs=(heads, heads), check_vma=False
    )
    _check(step, [np.asarray(x) for x in jax.jit(sharded)(step.q, pool, step.meta)])
"""


@pytest.mark.slow  # eight interpreted devices on two cores
def test_sharded_over_kv_heads_it_gives_the_same_numbers():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    folder = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, str(folder)], cwd=folder.parents[1], env=environment, timeout=280,
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


def test_what_cannot_be_names_the_limit():
    step = make_step(Case("any", decode=(5,), form="tpu"))
    with pytest.raises(ValueError, match="tiles.fetch must be a multiple of decode_kv = 128, got 200"):
        dataclasses.replace(TILES, fetch=200)
    with pytest.raises(ValueError, match="tiles.decode_kv must be a multiple of 128, got 64"):
        dataclasses.replace(TILES, decode_kv=64)
    with pytest.raises(ValueError, match="tiles.verify_q must be 8 or 16, got 17"):
        dataclasses.replace(TILES, verify_q=17)
    odd = make_step(Case("any", decode=(5,), block_size=24, form="tpu"))
    with pytest.raises(ValueError, match="tiles.fetch must be a multiple of block_size = 24, got 256"):
        ragged_paged_attention_mosaic_tpu(odd.q, odd.pool, odd.meta, sm_scale=1.0, tiles=TILES)
    with pytest.raises(NotImplementedError, match="q must be float32 or bfloat16, got float16"):
        ragged_paged_attention_mosaic_tpu(step.q.astype(jnp.float16), step.pool, step.meta, sm_scale=1.0)
    on_cpu = make_step(Case("any", decode=(5,)))
    with pytest.raises(NotImplementedError, match="form must be tpu, got cpu"):
        ragged_paged_attention(on_cpu.q, on_cpu.pool, on_cpu.meta, sm_scale=1.0, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="VMEM: 12582912 bytes do not hold"):
        default_tpu_tiles(PoolLayout(128, 256, 16, "float32", "tpu"), 1, 4, 2**24)


@pytest.mark.parametrize("vmem_mib", [16, 64, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"), [(9, 3, 64, "bfloat16"), (32, 8, 128, "bfloat16"), (8, 1, 256, "int8")]
)
@pytest.mark.parametrize("block_size", [16, 24, 64, 256])
def test_default_tiles_fit(heads, kv_heads, dim, dtype, block_size, vmem_mib):
    layout = PoolLayout(kv_heads, dim, block_size, dtype, "tpu")
    tiles = default_tpu_tiles(layout, heads // kv_heads, 2, vmem_mib * 2**20)
    assert tiles.fetch % block_size == 0 and tiles.prefill_q % tiles.strip == 0
    assert tiles.buffers * tiles.fetch * layout.bytes_per_token < tiles.vmem_bytes <= vmem_mib * 2**20
