"""Milliseconds a layer of KV write + attention, as an engine step runs them.

Thirty layers in one jit, each with its own donated pool, chained so that no layer can start before the last has ended.
Prints a table: cases down, block sizes and dtypes across, the median over rounds that alternate between all programs.

    python scripts/bench_attention.py --block-sizes 16,32,64 --dtypes bfloat16,int8,float8_e4m3fn
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionMetadata, PoolLayout, kv_write, make_pool, ragged_paged_attention

NUM_LAYERS = 30
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2-135M
MAX_SEQUENCES, MAX_TOKENS = 256, 8192
CASES = {  # name: (class, [(query_len, kv_len)], padded tokens)
    "decode 32 x 190": ("decode", [(1, 184 + i % 12) for i in range(32)], 32),
    "decode 64 x 315": ("decode", [(1, 309 + i % 12) for i in range(64)], 64),
    "decode 1 x 160": ("decode", [(1, 160)], 2),
    "decode 1 x 4000": ("decode", [(1, 4000)], 2),
    "decode 32, 20 to 640": ("decode", [(1, 20 * (i + 1)) for i in range(32)], 32),
    "verify 32 x 4 of 190": ("verify", [(4, 190)] * 32, 128),
    "prefill 4 x 128": ("prefill", [(128, 128)] * 4, 512),
    "prefill 512 of 2048": ("prefill", [(512, 2048)], 512),
    "31 x 190 and 225 new": ("mixed", [(1, 190)] * 31 + [(225, 225)], 256),
}


def make_metadata(kind, sequences, num_tokens, block_size) -> tuple[AttentionMetadata, int]:
    """Blocks scattered at random over the pool; also the pool's size in blocks."""
    max_blocks = MAX_TOKENS // block_size
    tables = np.zeros((MAX_SEQUENCES, max_blocks), np.int32)
    blocks = [-(-length // block_size) for _, length in sequences]
    order, used = 1 + np.random.default_rng(0).permutation(sum(blocks)), 0
    slots, starts = [], [0]
    for s, ((count, length), held) in enumerate(zip(sequences, blocks)):
        tables[s, :held] = order[used : used + held]
        used += held
        at = np.arange(length - count, length)
        slots += list(tables[s, at // block_size] * block_size + at % block_size)
        starts.append(starts[-1] + count)
    present = len(sequences)
    num_decode = sum(count == 1 for count, _ in sequences)
    ends = {
        "decode": (present, present, present),
        "verify": (0, present, present),
        "prefill": (0, 0, present),
        "mixed": (num_decode, num_decode, present),
    }
    lens = np.zeros(MAX_SEQUENCES, np.int32)
    lens[:present] = [length for _, length in sequences]
    meta = AttentionMetadata(
        seq_lens=lens,
        query_start_loc=np.pad(starts, (0, MAX_SEQUENCES - present), mode="edge").astype(np.int32),
        block_tables=tables,
        distribution=np.array(ends[kind], np.int32),
        slot_mapping=np.pad(slots, (0, num_tokens - len(slots))).astype(np.int32),
    )
    return jax.device_put(meta), sum(blocks) + 1


@functools.partial(jax.jit, donate_argnums=0)
def step(pools, q, k, v, meta):
    @jax.jit
    def layer(pool, q, k, v, meta):
        scale = jnp.full(NUM_KV_HEADS, 0.03) if pool.shard.is_quantised else None
        pool = kv_write(pool, k, v, meta.slot_mapping, k_scale=scale, v_scale=scale)
        return pool, ragged_paged_attention(q, pool, meta, sm_scale=HEAD_DIM**-0.5, k_scale=scale, v_scale=scale)

    written = []
    for pool in pools:
        pool, out = layer(pool, q, k, v, meta)
        written.append(pool)
        q, k, v = q + 0.01 * out, k + 0.01 * out[:, :NUM_KV_HEADS], v + 0.01 * out[:, -NUM_KV_HEADS:]
    return written, q


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-sizes", default="16,32,64")
    parser.add_argument("--dtypes", default="bfloat16", help="of the pool")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    args = parser.parse_args()
    columns = [(int(size), dtype) for size in args.block_sizes.split(",") for dtype in args.dtypes.split(",")]
    names = [name for name in CASES if args.only in name]
    programs, times = {}, {}
    for name in names:
        kind, sequences, num_tokens = CASES[name]
        for size, dtype in columns:
            meta, num_blocks = make_metadata(kind, sequences, num_tokens, size)
            layout = PoolLayout(NUM_KV_HEADS, HEAD_DIM, size, dtype)
            heads = num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM
            rows = np.random.default_rng(0).standard_normal(heads, np.float32)
            q, k, v = map(jnp.asarray, np.split(rows, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=1))
            pools = [make_pool(layout, num_blocks) for _ in range(NUM_LAYERS)]
            pools, _ = step(pools, q, k, v, meta)
            programs[name, size, dtype], times[name, size, dtype] = (pools, q, k, v, meta), []
    for _ in range(args.rounds):
        for key, (pools, *rest) in programs.items():
            start = time.perf_counter()
            pools, out = step(pools, *rest)
            out.block_until_ready()
            times[key].append(time.perf_counter() - start)
            programs[key] = (pools, *rest)
    scale = 1e3 / NUM_LAYERS
    print(f"{'ms a layer, median (least)':28}" + "".join(f"{f'B={size} {dtype}':>20}" for size, dtype in columns))
    for name in names:
        cells = [(statistics.median(times[name, *column]), min(times[name, *column])) for column in columns]
        print(f"{name:28}" + "".join(f"{f'{scale * mid:.3f} ({scale * least:.3f})':>20}" for mid, least in cells))


if __name__ == "__main__":
    main()
