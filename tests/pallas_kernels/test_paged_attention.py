"""Every implementation of `ragged_paged_attention` against the float64 reference, and the properties it must keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, MIXED, Case
from attention_cases import make_step as make_step_of_its_size
from kernel_backend import equal_bits_on_cpu, float32_products

from pallas_kernels import PoolLayout, kv_write, pool_struct, ragged_paged_attention
from pallas_kernels.paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.pool import logical_kv, pool_from_logical

# In pools of one size, that of MIXED in blocks of 16, they share programs: most of their time is the compiler's.
make_step = functools.partial(make_step_of_its_size, min_blocks=50)
STATIC = ("sm_scale", "sliding_window", "soft_cap", "return_lse", "tiles", "implementation")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend(q, pool, meta, **kwargs):
    return ragged_paged_attention(q, pool, meta, **kwargs)


def run(step, implementation="xla"):
    with float32_products():
        out, lse = attend(
            step.q, step.pool, step.meta, return_lse=True, implementation=implementation, **step.kwargs
        )
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


# Other cases have what these have, one at a time or in another size.
LONG = {"window_of_a_block", "bfloat16_pool_block_64", "fp8_block_64"}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.long if case.name in LONG else ()) for case in CASES],
)
def test_agrees_with_float64(case, implementation):
    step = make_step(case)
    out, lse = run(step, implementation=implementation)
    want, want_lse = ragged_paged_attention_reference(step.q, step.pool, step.meta, **step.kwargs)
    tolerance = 2e-6 if case.q_dtype == "float32" else 8e-3
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "name",
    ["mixed", pytest.param("group_4_block_64", marks=pytest.mark.long), "three_kv_heads", "int8",
     pytest.param("fp8", marks=pytest.mark.long)],
)  # fmt: skip
def test_xla_reads_every_form_of_the_pool(name, form):
    """What a chip's kernel cannot do falls to XLA, over the chip's pool. Not to the bit: the products differ."""
    case = next(case for case in CASES if case.name == name)
    want, want_lse = run(make_step(case), implementation="xla")
    out, lse = run(make_step(dataclasses.replace(case, form=form)), implementation="xla")
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


def test_padded_rows_are_zero():
    step = make_step(Case("padded", **MIXED, padded_to=160))
    out, lse = run(step)
    num_real = sum(count for count, _ in Case("", **MIXED).sequences)
    assert not out[num_real:].any() and np.isneginf(lse[num_real:]).all()


def test_output_has_the_dtype_of_q():
    step = make_step(Case("bf16", decode=(5, 9), q_dtype="bfloat16"))
    assert attend(step.q, step.pool, step.meta, **step.kwargs).dtype == jnp.bfloat16


@equal_bits_on_cpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_permuting_physical_blocks_changes_nothing(block_size):
    case = Case("permuted", **MIXED, block_size=block_size)
    here, there = (run(make_step(case, placement=placement)) for placement in (0, 1))
    np.testing.assert_array_equal(here[0], there[0])
    np.testing.assert_array_equal(here[1], there[1])


@equal_bits_on_cpu
def test_poison_in_unused_slots_changes_nothing():
    case = Case("poisoned", **MIXED, padded_to=160)
    clean, poisoned = (run(make_step(case, poison=poison)) for poison in (False, True))
    np.testing.assert_array_equal(clean[0], poisoned[0])


@equal_bits_on_cpu
def test_padding_changes_nothing():
    case = Case("padded", **MIXED)
    tight, padded = (run(make_step(dataclasses.replace(case, padded_to=size)))[0] for size in (0, 160))
    np.testing.assert_array_equal(tight, padded[: len(tight)])


def _rows_alone(case: Case, class_name: str, index: int, padded_to: int):
    """The rows of one sequence of `case`, computed with no neighbours, from the same pool."""
    step = make_step(case)
    offset = {"decode": 0, "verify": len(case.decode), "prefill": len(case.decode) + len(case.verify)}[class_name]
    s = offset + index
    start, end = (int(x) for x in step.meta.query_start_loc[s : s + 2])
    q = jnp.zeros((padded_to, *step.q.shape[1:]), step.q.dtype).at[: end - start].set(step.q[start:end])
    ranges = {"decode": (1, 1, 1), "verify": (0, 1, 1), "prefill": (0, 0, 1)}[class_name]
    meta = dataclasses.replace(
        step.meta,
        seq_lens=step.meta.seq_lens.at[0].set(step.meta.seq_lens[s]),
        block_tables=step.meta.block_tables.at[0].set(step.meta.block_tables[s]),
        query_start_loc=jnp.full_like(step.meta.query_start_loc, end - start).at[0].set(0),
        distribution=jnp.asarray(ranges, jnp.int32),
    )
    alone = run(dataclasses.replace(step, q=q, meta=meta))[0][: end - start]
    return alone, run(step)[0][start:end]


@equal_bits_on_cpu
@pytest.mark.parametrize(
    ("class_name", "index", "padded_to"),
    [
        ("decode", 1, 2),
        ("decode", 3, 2),
        ("decode", 3, 128),
        ("verify", 1, 4),
        ("verify", 1, 128),
        ("prefill", 1, 70),
        ("prefill", 1, 128),
    ],
)
def test_neighbours_change_nothing(class_name, index, padded_to):
    case = Case("crowd", **MIXED)
    alone, crowded = _rows_alone(case, class_name, index, padded_to)
    np.testing.assert_array_equal(alone, crowded)


def _chunk(step, case, start, end, ranges):
    """One step that computes tokens `[start, end)` of the case's only sequence, whose whole KV is in the pool.

    Later tokens are poisoned, as if not yet written. Padded to one of three buckets.
    """
    size = case.block_size
    bucket = next(size for size in (4, 64, 128) if end - start <= size)
    q = jnp.zeros((bucket, *step.q.shape[1:]), step.q.dtype).at[: end - start].set(step.q[start:end])
    table = np.asarray(step.meta.block_tables[0])
    keys, values = (np.array(numbers) for numbers in logical_kv(step.pool))
    later = np.arange(end, len(step.q))
    keys[table[later // size], later % size] = values[table[later // size], later % size] = np.nan
    pool = pool_from_logical(keys, values, step.pool.shard)
    meta = dataclasses.replace(
        step.meta,
        seq_lens=step.meta.seq_lens.at[0].set(end),
        query_start_loc=jnp.full_like(step.meta.query_start_loc, end - start).at[0].set(0),
        distribution=jnp.asarray(ranges, jnp.int32),
    )
    return run(dataclasses.replace(step, q=q, pool=pool, meta=meta))[0][: end - start]


@equal_bits_on_cpu
@pytest.mark.parametrize("options", [(), (("sliding_window", 50),)], ids=["full", "window"])
def test_chunked_prefill_equals_whole_prefill(options):
    case = Case("whole", prefill=((200, 200),), options=options)
    step = make_step(case)
    whole = run(step)[0]
    for cuts in ((0, 100, 200), (0, 37, 101, 164, 200), (0, 128, 193, 200)):
        chunks = [_chunk(step, case, *cut, (0, 0, 1)) for cut in zip(cuts, cuts[1:])]
        np.testing.assert_array_equal(np.concatenate(chunks), whole)


@equal_bits_on_cpu
def test_verified_tokens_equal_decoded_ones():
    case = Case("whole", prefill=((200, 200),))
    step = make_step(case)
    for start in (0, 62, 196):
        verified = _chunk(step, case, start, start + 4, (0, 1, 1))
        decoded = [_chunk(step, case, end - 1, end, (1, 1, 1)) for end in range(start + 1, start + 5)]
        np.testing.assert_array_equal(verified, np.concatenate(decoded))


@equal_bits_on_cpu
@pytest.mark.parametrize("options", [(), (("sliding_window", 50),)], ids=["full", "window"])
@pytest.mark.parametrize("block_size", [pytest.param(8, marks=pytest.mark.long), 16, 64])
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.long)])
def test_a_decoded_token_equals_the_same_in_a_prompt(block_size, head_dim, options):
    """So a sequence that is computed again, or goes on from what another one decoded, changes no bit."""
    length = min(200, 24 * block_size)  # a table's blocks
    case = Case("whole", prefill=((length, length),), head_dim=head_dim, block_size=block_size, options=options)
    step = make_step(case)
    whole = run(step)[0]
    for end in (1, 15, 64, 65, 130, 190, length):
        decoded = _chunk(step, case, end - 1, end, (1, 1, 1))
        np.testing.assert_array_equal(decoded, whole[end - 1 : end])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_never_copies_or_converts_the_pool(dtype):
    step = make_step(Case("any", **MIXED))
    layout = PoolLayout(num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def layer(pool, q, k, v, meta):
        pool = kv_write(pool, k, v, meta.slot_mapping)
        return pool, ragged_paged_attention(q, pool, meta, sm_scale=0.1)

    kv = step.q[:, :2]
    memory = layer.lower(pool_struct(layout, 20_000), step.q, kv, kv, step.meta).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 20_000 * layout.bytes_per_block
    assert memory.temp_size_in_bytes < 0.05 * memory.alias_size_in_bytes


def test_refuses_what_does_not_fit():
    step = make_step(Case("any", decode=(5,)))
    call = functools.partial(ragged_paged_attention, step.q, step.pool, step.meta, sm_scale=1.0)
    with pytest.raises(ValueError, match="mosaic_gpu, mosaic_tpu, xla, reference, got 'cuda'"):
        call(implementation="cuda")
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        call(sliding_window=0)
    with pytest.raises(ValueError, match="H a multiple of K = 2"):
        ragged_paged_attention(step.q[:, :3], step.pool, step.meta, sm_scale=1.0)
