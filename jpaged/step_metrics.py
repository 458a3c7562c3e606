"""StepMetrics: who hears what an engine's steps do."""

from typing import NamedTuple, Protocol

from jpaged.levels import Levels


class StepStats(NamedTuple):
    """What one engine step did, and the levels after it."""

    levels: Levels
    num_scheduled_tokens: int = 0
    num_padding_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0  # of these
    num_draft_tokens: int = 0  # computed because they might come next
    num_accepted_tokens: int = 0  # of these, did
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    host_gap_seconds: float = 0.0  # the device waited for the host this long before the step


class StepMetrics(Protocol):
    """What an EngineCore calls: EngineMetrics, or somebody who tells it in another process."""

    def set_cache_config(self, **config: object) -> None: ...
    def on_step(self, stats: StepStats) -> None: ...
    def on_levels(self, levels: Levels) -> None: ...
    def on_compile(self, phase: str) -> None: ...
