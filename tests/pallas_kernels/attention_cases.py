"""Named cases of the attention suite, and how a case becomes a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionMetadata, LayerPool, PoolLayout
from pallas_kernels.pool import pool_from_logical


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: `(query_len, kv_len)` of each sequence by class, and what the layer asks for."""

    name: str
    decode: tuple[int, ...] = ()  # KV lengths
    verify: tuple[tuple[int, int], ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    q_dtype: str = "float32"
    padded_to: int = 0  # tokens; 0 for none
    options: tuple[tuple[str, float], ...] = ()
    with_sinks: bool = False
    with_scales: bool = False
    form: str = "cpu"

    @property
    def sequences(self) -> list[tuple[int, int]]:
        return [(1, length) for length in self.decode] + [*self.verify, *self.prefill]


@dataclasses.dataclass(frozen=True)
class Step:
    """A case made real: the op's arguments."""

    q: jax.Array
    pool: LayerPool
    meta: AttentionMetadata
    kwargs: dict


def make_step(case: Case, *, placement: int | None = 0, poison: bool = True, min_blocks: int = 0) -> Step:
    """Draws the case's numbers and scatters its blocks over the pool by `placement`; None: one after the other.
    The pool has min_blocks at least, so that cases may share a program.

    Where `poison`, every slot that holds no token is NaN (in int8 the largest number), and so is every block that the
    window has passed, which is somebody else's by now; unfilled table entries point at the null block, and what no
    kernel may read of the metadata is nonsense.
    """
    rng = np.random.default_rng(0)
    max_sequences, max_blocks = 12, 24
    size, sequences = case.block_size, case.sequences
    blocks_of = [-(-length // size) for _, length in sequences]
    layout = PoolLayout(case.num_kv_heads, case.head_dim, size, case.dtype, case.form)
    num_blocks = max(sum(blocks_of) + 4, min_blocks)
    order = 1 + np.arange(num_blocks - 1)
    if placement is not None:
        np.random.default_rng(placement).shuffle(order)
    unused = 127.0 if case.dtype == "int8" else np.nan
    keys, values = np.full((2, num_blocks, size, case.num_kv_heads, case.head_dim), unused if poison else 0.0)
    tables, lens = np.zeros((max_sequences, max_blocks), np.int32), np.full(max_sequences, 7, np.int32)
    used = 0
    window = dict(case.options).get("sliding_window")
    for s, (count, (query_len, length)) in enumerate(zip(blocks_of, sequences)):
        ids = order[used : used + count]
        used += count
        tables[s, :count], lens[s] = ids, length
        k, v = rng.standard_normal((2, length, case.num_kv_heads, case.head_dim))
        if case.dtype == "int8":
            k, v = np.round(25 * k), np.round(25 * v)
        where = ids[np.arange(length) // size], np.arange(length) % size
        keys[where], values[where] = k, v
        if poison and window is not None:
            passed = ids[: max(length - query_len - window + 1, 0) // size]
            keys[passed], values[passed] = unused, unused
    query_lens = [count for count, _ in sequences]
    num_tokens = max(case.padded_to, sum(query_lens))
    q = np.full((num_tokens, case.num_heads, case.head_dim), np.nan if poison else 0.0)
    q[: sum(query_lens)] = rng.standard_normal((sum(query_lens), case.num_heads, case.head_dim))
    starts = np.full(max_sequences + 1, sum(query_lens), np.int32)
    starts[: len(sequences)] = np.cumsum([0, *query_lens[:-1]])
    ends = np.cumsum([len(case.decode), len(case.verify), len(case.prefill)])
    meta = AttentionMetadata(
        seq_lens=jnp.asarray(lens), query_start_loc=jnp.asarray(starts), block_tables=jnp.asarray(tables),
        distribution=jnp.asarray(ends, jnp.int32), slot_mapping=jnp.zeros(num_tokens, jnp.int32),
    )  # fmt: skip
    kwargs = {"sm_scale": case.head_dim**-0.5, **dict(case.options)}
    if case.with_sinks:
        kwargs["sinks"] = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32)
    if case.with_scales:
        scale = 0.04 if case.dtype == "int8" else 1.25
        kwargs["k_scale"] = jnp.asarray(scale * rng.uniform(0.5, 1.5, case.num_kv_heads), jnp.float32)
        kwargs["v_scale"] = jnp.asarray(scale, jnp.float32)
    pool = pool_from_logical(keys, values, layout)
    return Step(jnp.asarray(q, case.q_dtype), pool, meta, kwargs)


def hide_all_but_first_blocks(step: Step) -> Step:
    """The step with block tables of which only the first column can be used."""
    tables = step.meta.block_tables.at[:, 1:].set(0)
    return dataclasses.replace(step, meta=dataclasses.replace(step.meta, block_tables=tables))


MIXED = dict(decode=(1, 16, 17, 150), verify=((4, 90), (3, 131)), prefill=((40, 40), (70, 200), (1, 1)))

CASES = [
    Case("decode_only", decode=(1, 15, 16, 17, 63, 64, 65, 200, 128, 31)),
    Case("one_sequence", decode=(160,), padded_to=2),
    Case("decode_long_and_short", decode=(3, 380, 1), padded_to=8),
    Case("verify_only", verify=((4, 4), (8, 70), (2, 129), (5, 64))),
    Case("prefill_only", prefill=((33, 33), (64, 64), (65, 65), (20, 148))),
    Case("prefill_one_token", prefill=((1, 1),)),
    Case("mixed", **MIXED),
    Case("mixed_padded", **MIXED, padded_to=160),
    Case("nothing", padded_to=4),
    Case("group_1_block_32", **MIXED, num_heads=2, num_kv_heads=2, block_size=32),
    Case("group_4_block_64", **MIXED, num_heads=4, num_kv_heads=1, head_dim=80, block_size=64),
    Case("group_8_block_128", **MIXED, num_heads=8, num_kv_heads=1, head_dim=128, block_size=128),
    Case("window", **MIXED, options=(("sliding_window", 50),)),
    Case("window_of_a_block", **MIXED, options=(("sliding_window", 16),)),
    Case("soft_cap", **MIXED, options=(("soft_cap", 2.0),)),
    Case("sinks", **MIXED, with_sinks=True),
    Case(
        "everything",
        **MIXED,
        block_size=32,
        options=(("sliding_window", 70), ("soft_cap", 3.0)),
        with_sinks=True,
        padded_to=140,
    ),
    Case("bfloat16_pool", **MIXED, dtype="bfloat16"),
    Case("bfloat16_pool_block_64", **MIXED, dtype="bfloat16", block_size=64),
    Case("bfloat16_q", **MIXED, dtype="bfloat16", q_dtype="bfloat16"),
    Case("head_dim_256", **MIXED, num_heads=2, num_kv_heads=1, head_dim=256),
    Case("three_kv_heads", **MIXED, num_heads=9, num_kv_heads=3, dtype="bfloat16"),
    Case("int8", **MIXED, dtype="int8", with_scales=True),
    Case("fp8", **MIXED, dtype="float8_e4m3fn", with_scales=True),
    Case("fp8_block_64", **MIXED, dtype="float8_e4m3fn", with_scales=True, block_size=64),
]
