"""Preemption: which of the two ways back a sequence that has to go takes, and what is said of it."""

import logging
from dataclasses import dataclass
from typing import Self

from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.sequence import Sequence
from jpaged.swap_space import CHUNK

logger = logging.getLogger(__name__)

NOMINAL = {"cpu": (4e9, 1e11), "gpu": (25e9, 3e14), "tpu": (10e9, 1.5e14)}
"""platform -> (bytes/s between device and host, FLOP/s of a prefill), roughly: the two costs are mostly far apart."""
SECONDS_PER_COPY = 2e-4  # for the host to start the copy of a chunk


@dataclass(frozen=True)
class Preemption:
    """mode: "recompute", "swap", or "auto" for the cheaper by an estimate.

    Swapping moves all blocks out and in again; recomputing is a prefill of the tokens.
    """

    mode: str = "recompute"
    seconds_per_block: float = 0.0
    seconds_per_token: float = 0.0

    @classmethod
    def of(cls, config: EngineConfig, *, platform: str, bytes_per_block: int, num_weights: int) -> Self:
        """bytes_per_block and num_weights are those of one device."""
        bandwidth, flops = NOMINAL[platform]
        return cls(config.preemption_mode, bytes_per_block / bandwidth, 2 * num_weights / flops)

    def costs(self, num_blocks: int, num_tokens: int) -> tuple[float, float]:
        """Seconds of swapping and of recomputing."""
        one_way = num_blocks * self.seconds_per_block + -(-num_blocks // CHUNK) * SECONDS_PER_COPY
        return 2 * one_way, num_tokens * self.seconds_per_token

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        swap, recompute = self.costs(num_blocks, num_tokens)
        return self.mode == "swap" or (self.mode == "auto" and swap < recompute)

    def explain(self, is_swapped: bool, num_blocks: int, num_tokens: int) -> str:
        """The way back in words, with the estimate where it decided."""
        way = "is swapped out" if is_swapped else "will be recomputed"
        if self.mode != "auto":
            return way
        swap, recompute = self.costs(num_blocks, num_tokens)
        why = f"moving {num_blocks} blocks out and in: {_ms(swap)}, computing {num_tokens} tokens: {_ms(recompute)}"
        is_full = not is_swapped and swap < recompute
        return f"{way} ({why}{'; swap_space is full' if is_full else ''})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def warn_of_preemption(seq: Sequence, way: str, spec: CacheSpec, num_preemptions: int) -> None:
    logger.warning(
        "request %s is preempted and %s: the KV pool's %d blocks are all in use (%d preemptions so far). Raise "
        "kv_cache_memory_bytes, or lower max_num_seqs or max_num_batched_tokens.",
        seq.request_id,
        way,
        spec.num_usable_blocks,
        num_preemptions,
    )
