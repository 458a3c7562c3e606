"""CacheSpec: the pool as it was sized at start-up, and what of it sequences need."""

from bisect import bisect_right
from dataclasses import dataclass

from jpaged.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The pool as it was sized: num_blocks counts the null block.

    windows: of each attention group, how many tokens its layers see; None for all. A sequence has logical blocks, of
    block_size tokens each, and for each a block of every group but those whose window has passed it.
    max_num_batched_tokens: the most tokens that a step writes, beside those that a window sees.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    windows: tuple[int | None, ...] = (None,)
    max_num_batched_tokens: int = 0

    @property
    def has_windows(self) -> bool:
        """Without any there is one group."""
        return any(self.windows)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        """How long a sequence may grow that is alone in the pool, as far as max_model_len matters."""
        return self.num_tokens_in(self.num_usable_blocks)

    def num_tokens_in(self, num_blocks: int, num_samples: int = 1, num_shared: int = 0) -> int:
        """How long some samples that share num_shared logical blocks may grow in so many blocks."""
        candidates = range(num_shared, num_shared + max(num_blocks, self.max_blocks_per_seq) + 1)
        num_fitting = bisect_right(
            candidates, num_blocks, key=lambda num: self.num_blocks_for(num * self.block_size, num_samples, num_shared)
        )
        return (num_shared + num_fitting - 1) * self.block_size

    def num_blocks_for(self, num_tokens: int, num_samples: int = 1, num_shared: int = 0) -> int:
        """The most blocks that some samples of num_tokens tokens hold at a time that share num_shared logical blocks."""
        num_logical = self.num_logical_for(num_tokens)
        return sum(
            self._most(num_logical, window) + (num_samples - 1) * self._most(num_logical - num_shared, window)
            for window in self.windows
        )

    def num_blocks_for_samples(self, num_prompt: int, max_tokens: int, num_samples: int) -> int:
        """The same of a request's samples, which share the prompt's full blocks and may share nothing else. The last
        token of each is never computed."""
        return self.num_blocks_for(num_prompt + max_tokens - 1, num_samples, num_prompt // self.block_size)

    def _most(self, num_logical: int, window: int | None) -> int:
        """The most blocks that one group holds of so many: what a step of the longest chunk writes and sees."""
        if window is None:
            return num_logical
        return min(num_logical, (window + self.max_num_batched_tokens - 3) // self.block_size + 2)

    def num_logical_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def seen_from(self, num_tokens: int) -> list[int]:
        """Of each group, the first logical block that tokens after num_tokens tokens see."""
        return [0 if w is None else max(num_tokens - w + 1, 0) // self.block_size for w in self.windows]

    @property
    def max_blocks_per_seq(self) -> int:
        """M, the logical blocks of a block table."""
        return self.num_logical_for(self.max_model_len)

    @property
    def table_width(self) -> int:
        """The entries of a block table: a block of each group for every logical block."""
        return self.max_blocks_per_seq * len(self.windows)


def resolve_max_model_len(config: EngineConfig, max_position: int, num_usable_tokens: int) -> int:
    """The context length that this model and this pool can serve.

    Raises ValueError where the user asked for more, or where whole prompts must fit in one step and do not.
    """
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ValueError(f"max_model_len ({config.max_model_len}) is over the model's context of {max_position} tokens")
    if config.max_model_len is not None and config.max_model_len > num_usable_tokens:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) does not fit in the KV pool of {num_usable_tokens} tokens; "
            "raise kv_cache_memory_bytes or lower max_model_len"
        )
    length = config.max_model_len or min(max_position, num_usable_tokens)
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < length:
        raise ValueError(
            f"with chunked prefill off, max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least "
            f"max_model_len ({length}): a whole prompt has to fit in one step"
        )
    return length
