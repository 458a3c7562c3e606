"""RequestCheck: refuses, in one line with the value and the limit, a request that can never be served."""

from dataclasses import dataclass
from typing import Self

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
    scheduling_policy: str = "fcfs"

    @classmethod
    def of(cls, config: EngineConfig, spec: CacheSpec, *, vocab_size: int, max_position: int) -> Self:
        return cls(
            vocab_size, spec.max_model_len, max_position, spec.num_usable_tokens, config.max_logprobs,
            config.scheduling_policy,
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
