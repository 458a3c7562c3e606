"""RequestCheck: refuses, in one line with the value and the limit, a request that can never be served."""

from dataclasses import dataclass
from typing import Self

from jpaged.bad_words import bad_word_tokens
from jpaged.config import CacheSpec, EngineConfig
from jpaged.sampling_params import SamplingParams
from jpaged.tokenizer import Tokenizer


@dataclass(frozen=True)
class RequestCheck:
    """The limits of one engine. JAX clamps ids out of range silently, so they must not reach the device."""

    vocab_size: int
    max_model_len: int
    max_position: int
    num_usable_tokens: int
    max_logprobs: int
    max_unchunked: int | None  # tokens of a prompt whose log-probs one step must return; None for no limit
    tokenizer: Tokenizer
    scheduling_policy: str = "fcfs"

    @classmethod
    def of(
        cls, config: EngineConfig, spec: CacheSpec, tokenizer: Tokenizer, *, vocab_size: int, max_position: int
    ) -> Self:
        max_unchunked = None if config.enable_chunked_prefill else config.max_num_seqs
        return cls(
            vocab_size, spec.max_model_len, max_position, spec.num_usable_tokens, config.max_logprobs, max_unchunked,
            tokenizer, config.scheduling_policy,
        )  # fmt: skip

    def __call__(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises ValueError."""
        if not prompt_token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        for name, ids in (
            ("prompt", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            worst = max(ids, default=0)
            worst = worst if worst >= self.vocab_size else min(ids, default=0)
            if not 0 <= worst < self.vocab_size:
                raise ValueError(f"{name} holds token id {worst}; the vocabulary ends at {self.vocab_size - 1}")
        bad_word_tokens(params.bad_words, self.tokenizer)
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
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise ValueError(f"{name} is {getattr(params, name)}; the limit is {self.max_logprobs} (max_logprobs)")
        if params.prompt_logprobs is not None and self.max_unchunked is not None and num_prompt > self.max_unchunked:
            raise ValueError(
                f"prompt_logprobs of a prompt of {num_prompt} tokens needs chunked prefill; without it the limit is "
                f"{self.max_unchunked} tokens (max_num_seqs)"
            )
        if params.priority != 0 and self.scheduling_policy != "priority":
            raise ValueError(
                f"priority is {params.priority}, but scheduling_policy is {self.scheduling_policy}, which has none: "
                "it must be 0"
            )
