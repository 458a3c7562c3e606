"""Levels: how full the engine is."""

from typing import NamedTuple, Self

from jpaged.scheduler import Scheduler


class Levels(NamedTuple):
    """What is in the engine at a moment: sequences, and the blocks that they hold and share."""

    num_running: int = 0
    num_waiting: int = 0
    num_forks: int = 0  # to come: samples of those that run that have not started yet
    num_copies: int = 0  # of blocks, to be made before the next step
    num_logical_blocks: int = 0
    num_physical_blocks: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    kv_cache_sharing: float = 1.0  # logical blocks over physical ones

    @classmethod
    def of(cls, scheduler: Scheduler) -> Self:
        kv = scheduler.kv
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_forks=len(scheduler.forks),
            num_copies=len(kv.copies),
            num_logical_blocks=kv.pool.num_owned,
            num_physical_blocks=kv.pool.num_used,
            kv_cache_usage=kv.usage,
            kv_cache_sharing=kv.sharing,
        )
