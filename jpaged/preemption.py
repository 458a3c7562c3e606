"""Preemption: what a sequence that has to go is told, and how it comes back."""

import logging

from jpaged.config import CacheSpec
from jpaged.sequence import Sequence

logger = logging.getLogger(__name__)


def warn_of_preemption(seq: Sequence, spec: CacheSpec, num_preemptions: int) -> None:
    logger.warning(
        "request %s is preempted and will be recomputed: the KV pool's %d blocks are all in use (%d preemptions so "
        "far). Raise kv_cache_memory_bytes, or lower max_num_seqs or max_num_batched_tokens.",
        seq.request_id,
        spec.num_usable_blocks,
        num_preemptions,
    )
