"""RequestCheck: refuses, in one line with the value and the limit, a request that can never be served."""

from dataclasses import dataclass
from typing import Self

from jpaged.beam_search import num_candidates
from jpaged.config import CacheSpec, EngineConfig
from jpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestCheck:
    """The limits of one engine. JAX clamps ids out of range silently, so they must not reach the device."""

    vocab_size: int
    max_model_len: int
    max_position: int
    num_usable_tokens: int
    max_logprobs: int
    block_size: int
    max_num_seqs: int
    num_eos_tokens: int
    scheduling_policy: str = "fcfs"
    has_speculation: bool = False

    @classmethod
    def of(
        cls, config: EngineConfig, spec: CacheSpec, *, vocab_size: int, max_position: int, num_eos_tokens: int
    ) -> Self:
        return cls(
            vocab_size, spec.max_model_len, max_position, spec.num_usable_tokens, config.max_logprobs, spec.block_size,
            config.max_num_seqs, num_eos_tokens, config.scheduling_policy, config.speculative_config is not None,
        )  # fmt: skip

    def __call__(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises ValueError."""
        if not prompt_token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        for name, ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
            worst = max(ids, default=0)
            worst = worst if worst >= self.vocab_size else min(ids, default=0)
            if not 0 <= worst < self.vocab_size:
                raise ValueError(f"{name} holds token id {worst}; the vocabulary ends at {self.vocab_size - 1}")
        num_prompt, limit = len(prompt_token_ids), self.max_model_len
        why = "" if limit == self.max_position else f" (the KV pool holds {self.num_usable_tokens})"
        if num_prompt >= limit:
            raise ValueError(f"the prompt has {num_prompt} tokens; the context is {limit} tokens{why}, output included")
        if params.max_tokens is not None and num_prompt + params.max_tokens > limit:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}, together "
                f"{num_prompt + params.max_tokens}; the context is {limit} tokens{why}"
            )
        if params.min_tokens > limit - num_prompt:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but only {limit - num_prompt} tokens fit after the prompt"
            )
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise ValueError(f"logprobs is {params.logprobs}; the limit is {self.max_logprobs} (max_logprobs)")
        if params.priority != 0 and self.scheduling_policy != "priority":
            raise ValueError(
                f"priority is {params.priority}, but scheduling_policy is {self.scheduling_policy}, which has none: "
                "it must be 0"
            )
        if params.use_beam_search:
            self._check_beams(params)
        if params.num_samples > 1:
            self._check_samples(num_prompt, params)

    def max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """What was asked for, or as much as the context and, where samples share it, the pool can hold."""
        if params.max_tokens is not None:
            return params.max_tokens
        num_shared, num_blocks = num_prompt // self.block_size, self.num_usable_tokens // self.block_size
        num_each = num_shared + (num_blocks - num_shared) // params.num_samples
        return min(self.max_model_len - num_prompt, num_each * self.block_size - num_prompt + 1)

    def _check_beams(self, params: SamplingParams) -> None:
        if self.has_speculation:
            raise ValueError("use_beam_search is true, but the engine has a speculative_config: it must be false")
        num_stops = len(params.stop_token_ids) + (0 if params.ignore_eos else self.num_eos_tokens)
        num_needed = num_candidates(params.n, num_stops)
        if num_needed > self.max_logprobs:
            raise ValueError(
                f"n is {params.n} beams, which need {num_needed} log-probs at each position with {num_stops} stop "
                f"tokens; the limit is {self.max_logprobs} (max_logprobs)"
            )

    def _check_samples(self, num_prompt: int, params: SamplingParams) -> None:
        """Several samples share the prompt's full blocks and may share nothing else."""
        name = "n" if params.best_of is None else "best_of"
        if params.num_samples > self.max_num_seqs:
            raise ValueError(f"{name} is {params.num_samples}; the limit is {self.max_num_seqs} (max_num_seqs)")
        max_tokens = max(self.max_tokens(num_prompt, params), params.min_tokens, 1)
        num_shared = num_prompt // self.block_size
        num_each = -(-(num_prompt + max_tokens - 1) // self.block_size) - num_shared
        num_needed = num_shared + params.num_samples * num_each
        num_blocks = self.num_usable_tokens // self.block_size
        if num_needed > num_blocks:
            raise ValueError(
                f"{params.num_samples} samples ({name}) of {num_prompt} prompt tokens and {max_tokens} more need "
                f"{num_needed} blocks of the KV pool; it has {num_blocks}"
            )
