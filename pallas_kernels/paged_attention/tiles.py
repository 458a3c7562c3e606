"""How the implementations cut their work: each has tiles of its own kind."""

import dataclasses
import math

from ..layout import LANES, PoolLayout


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static tile sizes of the XLA implementation. `partition` decides the order of summation, the others only speed.

    KV is reduced in runs of `partition` positions that start at its multiples, counted from position 0 of the sequence,
    whatever is being computed: that is what makes chunked prefill equal whole prefill to the bit.
    """

    partition: int  # KV positions; a multiple of the block size
    pairs: int  # (token, partition) pairs that decode takes at a time
    few_pairs: int  # the same where no more than these are left; a loop of its own where it is not `pairs`
    prefill_rows: int  # queries in a tile


def default_tiles(block_size: int, num_tokens: int) -> Tiles:
    """Measured on XLA:CPU (H/K/D = 9/3/64): few idle pairs in a small step, few iterations in a large.

    One sequence of 1000 tokens takes 5.3 ms for 30 layers with 16 pairs and 8.7 with 4, one of 160 takes 3.3 and 2.5.
    Partitions of 128 made decode 10 % slower at 64 sequences of 315, 25 % at lengths from 20 to 640; tiles of 64 made
    prefill 10 to 30 % slower than tiles of 128. 32 sequences of 190 tokens take 36 ms with a loop for the last 32 pairs, 41
    without.
    """
    pairs, few_pairs = (16, 4) if num_tokens <= 4 else (32, 32) if num_tokens <= 24 else (64, 32)
    return Tiles(partition=math.lcm(64, block_size), pairs=pairs, few_pairs=few_pairs, prefill_rows=128)


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """Static tile sizes of the TPU kernel. What is moved at a time is apart from what is multiplied at a time."""

    fetch: int  # KV positions in a buffer; a multiple of the block size and of both tile_kv
    buffers: int  # of KV: one is computed on while the others fill
    decode_kv: int  # KV positions multiplied at a time in decode and verify; a multiple of 128
    prefill_kv: int  # the same in prefill
    verify_q: int  # queries in a tile of the verify range, 8 or 16
    prefill_q: int  # queries in a tile of the prefill range; a multiple of strip
    strip: int  # queries multiplied at a time in prefill; a power of two, at least 16
    vmem_bytes: int  # that the program may take

    def __post_init__(self):
        for name, unit in (("decode_kv", LANES), ("prefill_kv", LANES), ("strip", 16), ("prefill_q", self.strip)):
            if getattr(self, name) < 1 or getattr(self, name) % unit:
                raise ValueError(f"tiles.{name} must be a multiple of {unit}, got {getattr(self, name)}")
        for name in ("decode_kv", "prefill_kv"):
            if self.fetch < 1 or self.fetch % getattr(self, name):
                raise ValueError(f"tiles.fetch must be a multiple of {name} = {getattr(self, name)}, got {self.fetch}")
        if self.buffers < 2:
            raise ValueError(f"tiles.buffers must be at least 2, got {self.buffers}")
        if self.verify_q not in (8, 16):
            raise ValueError(f"tiles.verify_q must be 8 or 16, got {self.verify_q}")
        if self.strip & (self.strip - 1):
            raise ValueError(f"tiles.strip must be a power of two, got {self.strip}")


_MIB = 2**20
_KV_BYTES = 6 * _MIB  # of all KV buffers, at most: what a chip has under way at 3 TB/s and 2 us
_PREFILL_ROWS = 1024  # rows of one head in a prefill tile: FLOP a byte of KV, 574 to keep up with a v6e
_STRIP_ROWS = 512  # of one head, multiplied at a time: a v6e's schedule has 473 cycles for 512 rows, 327 for 256


def default_tpu_tiles(layout: PoolLayout, group: int, num_q_bytes: int, vmem_bytes: int) -> TpuTiles:
    """Tiles for one shard and for queries of `num_q_bytes` a number, `group` heads to a KV head, that take no more than
    three quarters of a core's `vmem_bytes`: XLA keeps weights that it fetched early in the rest, which a log-sum-exp,
    where one is asked for, takes a part of.

    Not measured, for want of a chip: sized by what must be under way to hide a fetch's latency, and by the FLOP a byte
    of KV that keep the matrix unit busy. Raises `NotImplementedError` where nothing fits.
    """
    budget = min(vmem_bytes * 3 // 4, 48 * _MIB)
    bytes_per_token, kv_bytes = layout.bytes_per_token, min(_KV_BYTES, budget // 3)
    for tile_kv in (256, 128):
        unit = math.lcm(tile_kv, layout.block_size)
        fetch = unit * max(1, 512 // unit)
        while fetch > unit and 2 * fetch * bytes_per_token > kv_bytes:
            fetch -= unit
        if 2 * fetch * bytes_per_token <= max(kv_bytes, budget // 2):
            break
    # Short sequences fill no buffer: more of them, so that as much is under way.
    buffers = max(2, min(8, kv_bytes // (fetch * bytes_per_token)))
    left = budget - buffers * fetch * bytes_per_token
    for prefill_q in (256, 128, 64, 32, 16):
        rows, strip = layout.num_kv_heads * prefill_q * group, min(prefill_q, _largest_strip(group))
        state = 2 * LANES * 4 + layout.lanes * 4
        used = rows * (state + 5 * layout.lanes * num_q_bytes)
        used += group * strip * (state + tile_kv * (4 + num_q_bytes) + LANES * 4)  # of those under way
        used += 4 * tile_kv * layout.lanes * num_q_bytes
        if prefill_q * group <= max(_PREFILL_ROWS, 16 * group) and used <= left:
            break
    else:
        raise NotImplementedError(
            f"VMEM: {budget} bytes do not hold {buffers} KV buffers of {fetch} tokens of {bytes_per_token} bytes and "
            f"the state of {layout.num_kv_heads} x {16 * group} rows"
        )
    return TpuTiles(
        fetch=fetch, buffers=buffers, decode_kv=tile_kv, prefill_kv=tile_kv, verify_q=8, prefill_q=prefill_q,
        strip=strip, vmem_bytes=max(16 * _MIB, budget),
    )  # fmt: skip


def _largest_strip(group: int) -> int:
    """The power of two of queries, at least 16, whose rows of one KV head are not over `_STRIP_ROWS`."""
    return max(16, 1 << (_STRIP_ROWS // group).bit_length() - 1)
