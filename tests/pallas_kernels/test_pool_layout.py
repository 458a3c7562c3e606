"""The pool's shape, size and sharding, and that its physical form holds what was meant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import PoolLayout, kv_absmax, make_pool, pool_struct
from pallas_kernels.layout import DTYPES
from pallas_kernels.pool import logical_kv, pool_from_logical


@st.composite
def layouts(draw, dtypes=DTYPES) -> PoolLayout:
    num_shards = draw(st.sampled_from([1, 2, 4]))
    return PoolLayout(
        num_kv_heads=num_shards * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 64, 80, 128, 160, 256])),
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        dtype=draw(st.sampled_from(dtypes)),
        form=draw(st.sampled_from(["cpu", "gpu", "tpu"])),
        num_shards=num_shards,
    )


@given(layouts())
def test_bytes_are_what_a_pool_takes(layout):
    pool = make_pool(layout, 3)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == 3 * layout.bytes_per_block
    assert layout.bytes_per_block == layout.block_size * layout.bytes_per_token
    numbers = 2 * layout.num_kv_heads * layout.head_dim * jnp.dtype(layout.dtype).itemsize
    assert layout.bytes_per_token - layout.padding_bytes_per_token == numbers
    assert layout.form == "tpu" or layout.padding_bytes_per_token == 0


@given(layouts())
def test_struct_describes_the_pool(layout):
    pool, struct = make_pool(layout, 3), pool_struct(layout, 3)
    assert jax.tree.structure(pool) == jax.tree.structure(struct)
    for made, described in zip(jax.tree.leaves(pool), jax.tree.leaves(struct)):
        assert (made.shape, made.dtype) == (described.shape, described.dtype)
    assert (pool.num_blocks, pool.block_size) == (3, layout.block_size)
    assert (pool.num_kv_heads, pool.head_dim) == (layout.num_kv_heads, layout.head_dim)


def _numbers(layout: PoolLayout):
    shape = 3, layout.block_size, layout.num_kv_heads, layout.head_dim
    return np.random.default_rng(0).integers(-15, 16, (2, *shape)).astype(np.float64)  # exact in every dtype


@given(layouts())
def test_physical_form_keeps_every_number(layout):
    k, v = _numbers(layout)
    got_k, got_v = logical_kv(pool_from_logical(k, v, layout))
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)


@settings(max_examples=40)  # each compiles several slices; there are 1296 layouts
@given(layouts(dtypes=("float32", "bfloat16")))
def test_a_shard_owns_its_heads_and_no_others(layout):
    """What a device would be given of the arrays is itself a pool: of that shard's heads."""
    k, v = _numbers(layout)
    whole = pool_from_logical(k, v, layout)
    owners = [head for shard in range(layout.num_shards) for head in layout.kv_heads_of(shard)]
    assert owners == list(range(layout.num_kv_heads))
    for number in range(layout.num_shards):
        part = jax.tree.map(lambda leaf: np.split(leaf, layout.num_shards, layout.sharded_axis)[number], whole)
        assert part.num_shards == 1 and part.num_kv_heads == layout.shard.num_kv_heads
        mine = layout.kv_heads_of(number)
        for got, want in zip(logical_kv(part), (k, v)):
            np.testing.assert_array_equal(got, want[:, :, mine.start : mine.stop])


def test_the_tpu_form_follows_its_registers():
    """(K, D, dtype, shards): rows of a token over all shards, lanes, bytes of padding."""
    expected = {
        (3, 64, "bfloat16", 1): (4, 128, 256),  # SmolLM2: three rows, the fourth is padding
        (8, 128, "bfloat16", 8): (16, 128, 0),
        (8, 128, "int8", 8): (32, 128, 2048),  # two rows a shard, four to a sublane: no gain over bfloat16
        (8, 128, "int8", 4): (16, 128, 0),
        (2, 80, "float32", 1): (4, 128, 768),
        (1, 256, "bfloat16", 1): (2, 256, 0),
    }
    for (heads, dim, dtype, shards), (rows, lanes, padding) in expected.items():
        layout = PoolLayout(heads, dim, 16, dtype, "tpu", shards)
        ((_, size, groups, packing, width),) = layout.shapes(5)
        assert (size, groups * packing, width, layout.padding_bytes_per_token) == (16, rows, lanes, padding), layout
        assert packing * jnp.dtype(dtype).itemsize == 4


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128)])
def test_a_quantised_block_is_half_of_a_bfloat16_one(heads, dim, form, dtype):
    plain, quantised = (PoolLayout(heads, dim, 16, name, form) for name in ("bfloat16", dtype))
    assert 2 * quantised.bytes_per_block == plain.bytes_per_block


@pytest.mark.parametrize("form", ["cpu", "gpu", "tpu"])
def test_the_largest_magnitudes_of_some_blocks(form):
    k, v = (np.random.default_rng(seed).normal(size=(7, 4, 3, 8)).astype(np.float32) for seed in (0, 1))
    pool = pool_from_logical(k, v, PoolLayout(3, 8, 4, "float32", form))
    ids = np.array([[1, 2], [5, 6]])
    expected = np.stack([np.abs(x[ids]).max(axis=(1, 2, 4)) for x in (k, v)], axis=1)
    np.testing.assert_array_equal(kv_absmax(pool, jnp.asarray(ids)), expected)


@pytest.mark.parametrize(("form", "axis"), [("cpu", 1), ("gpu", 2), ("tpu", 2)])
def test_partition_spec_shards_kv_heads(form, axis):
    layout = PoolLayout(2, 8, 4, "float32", form)
    spec = layout.partition_spec("model")
    assert spec == PartitionSpec(*[None] * axis, "model")
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    sharding = NamedSharding(mesh, spec)
    for made, described in zip(make_pool(layout, 3, sharding).arrays, pool_struct(layout, 3, sharding).arrays):
        assert made.sharding == described.sharding == sharding and made.shape[axis] == 2


def test_refuses_impossible_layouts():
    with pytest.raises(ValueError, match="float32, bfloat16, int8, float8_e4m3fn, got 'int4'"):
        PoolLayout(2, 8, 4, "int4")
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        PoolLayout(2, 8, 0, "float32")
    with pytest.raises(ValueError, match="form must be cpu, gpu or tpu, got 'rocm'"):
        PoolLayout(2, 8, 4, "float32", "rocm")
    with pytest.raises(ValueError, match="num_shards must divide num_kv_heads = 3, got 2"):
        PoolLayout(3, 8, 4, "float32", num_shards=2)
    with pytest.raises(ValueError, match="at least 2 .*, got 1"):
        make_pool(PoolLayout(2, 8, 4, "float32"), 1)
