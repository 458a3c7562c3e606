"""Where the memory goes: sizes the KV pool from what is really there, and says so."""

import logging
from collections import Counter
from dataclasses import dataclass, replace

import jax

from jpaged.cache_spec import CacheSpec, resolve_max_model_len
from jpaged.config import EngineConfig

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 1 << 30  # the stated default: host memory has no limit that belongs to the engine alone


@dataclass(frozen=True)
class StepMemory:
    """What the compiled largest step needs on one device beside weights and pool, in bytes."""

    temp: int
    output: int
    code: int


def device_limit(device: jax.Device) -> int | None:
    """Bytes of memory that the device gives to this process; None on CPU, which has no limit of its own."""
    if device.platform == "cpu":
        return None
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise NotImplementedError(
            f"{device} does not tell its memory; give kv_cache_memory_bytes or num_blocks_override"
        )
    return stats["bytes_limit"]


def num_blocks_beside(needed: int, bytes_per_block: int, config: EngineConfig, device: jax.Device) -> int:
    """How many blocks an accelerator could hold beside so many bytes."""
    return _free_beside(needed, config, device_limit(device)) // bytes_per_block


def _free_beside(needed: int, config: EngineConfig, limit: int) -> int:
    return int(limit * config.device_memory_utilization) - needed


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of one device (all devices have the same), and the pool that comes of them."""

    spec: CacheSpec
    device: str
    limit: int | None
    weights: int
    rows: int
    step: StepMemory | None
    num_programs: int
    pool: int
    cache_dtype: str
    reason: str

    def table(self, num_pinned_blocks: int = 0, num_host_blocks: int = 0) -> str:
        """The start-up table."""
        rows = [("weights", self.weights, ""), ("running sequences", self.rows, "tables, penalties and biases")]
        if self.step is not None:
            rows.append(("step's temporaries", self.step.temp + self.step.output, "of the largest program"))
            rows.append(("programs", self.step.code * self.num_programs, f"{self.num_programs} programs"))
        blocks = f"{self.spec.num_blocks} blocks of {self.spec.block_size} tokens, {self.cache_dtype}"
        rows.append(("KV pool", self.pool, f"{blocks} ({self.reason})"))
        if num_pinned_blocks:
            pinned = self.pool // self.spec.num_blocks * num_pinned_blocks
            rows.append(("  pinned prefixes", pinned, f"{num_pinned_blocks} of these blocks"))
        if num_host_blocks:
            size = self.pool // self.spec.num_blocks * num_host_blocks
            rows.append(("swap space", size, f"{num_host_blocks} blocks at most, in host memory"))
        if self.limit is not None:
            rows.append(("limit", self.limit, f"of {self.device}"))
        lines = [f"memory on {self.device}:"]
        lines += [f"  {name:<20}{size / 2**20:>10,.1f} MiB  {note}".rstrip() for name, size, note in rows]
        num_blocks = self.spec.num_usable_blocks - num_pinned_blocks
        length = min(self.spec.max_model_len, self.spec.num_tokens_in(num_blocks))
        if self.spec.has_windows:
            size = self.spec.num_blocks_for(length)
            groups = ", ".join(
                f"{count} of {'all tokens' if window is None else f'the last {window:,} tokens'}"
                for window, count in Counter(self.spec.windows).items()
            )
            lines.append(f"  attention groups: {groups}; each has its own blocks")
            fit = f"{num_blocks / size:.1f} requests of the maximum length, {length:,} tokens in {size:,} blocks, fit"
        else:
            tokens = num_blocks * self.spec.block_size
            fit = f"{tokens:,} tokens fit: {tokens / length:.1f} requests of the maximum length, {length:,} tokens"
        lines.append(f"  {fit}")
        return "\n".join(lines)


def plan_memory(
    config: EngineConfig,
    *,
    max_position: int,
    block_size: int,
    bytes_per_block: int,
    cache_dtype: str,
    weights: int,
    rows: int,
    device: jax.Device,
    step: StepMemory | None,
    num_programs: int,
    windows: tuple[int | None, ...] = (None,),
) -> MemoryPlan:
    """Sizes the pool. weights, rows (the state of running sequences) and bytes_per_block are those of one device.

    Raises ValueError when what is left holds no usable pool, with the numbers.
    """
    limit = device_limit(device)
    if config.num_blocks_override is not None:
        num_blocks, reason = config.num_blocks_override, "num_blocks_override"
    else:
        if config.kv_cache_memory_bytes is not None:
            available, reason = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        elif limit is None:
            available, reason = CPU_POOL_BYTES, "the default on CPU"
        else:
            needed = weights + rows + step.temp + step.output + step.code * num_programs
            available = _free_beside(needed, config, limit)
            reason = f"what is free of {config.device_memory_utilization:.0%}"
        num_blocks = available // bytes_per_block
        if num_blocks < 2:
            raise ValueError(
                f"{max(available, 0)} bytes for the KV pool ({reason}) hold {max(num_blocks, 0)} blocks of "
                f"{bytes_per_block} bytes; at least 2 are needed"
            )
    spec = CacheSpec(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_position,
        windows=windows,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    spec = replace(spec, max_model_len=resolve_max_model_len(config, max_position, spec.num_usable_tokens))
    pool = num_blocks * bytes_per_block
    return MemoryPlan(spec, str(device), limit, weights, rows, step, num_programs, pool, cache_dtype, reason)
