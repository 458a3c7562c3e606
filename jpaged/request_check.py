"""RequestCheck: refuses, in one line with the value and the limit, a request that can never be served."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from jpaged.bad_words import bad_word_tokens
from jpaged.beam_search import num_candidates
from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.errors import ContextLengthError
from jpaged.sampling_params import SamplingParams
from jpaged.tokenizer import Tokenizer


@dataclass(frozen=True)
class RequestCheck:
    """The limits of one engine. JAX clamps ids out of range silently, so they must not reach the device."""

    vocab_size: int
    max_position: int
    spec: CacheSpec
    num_usable_blocks: int  # beside the pinned prefixes
    max_logprobs: int
    max_num_seqs: int
    max_num_edited_seqs: int
    max_unchunked: int | None  # tokens of a prompt whose log-probs one step must return; None for no limit
    tokenizer: Tokenizer
    scheduling_policy: str = "fcfs"

    @classmethod
    def of(
        cls, config: EngineConfig, spec: CacheSpec, tokenizer: Tokenizer, *, vocab_size: int, max_position: int
    ) -> Self:
        return cls(
            vocab_size, max_position, spec, spec.num_usable_blocks, config.max_logprobs,
            config.max_num_seqs, config.max_num_edited_seqs,
            None if config.enable_chunked_prefill else config.max_num_seqs, tokenizer, config.scheduling_policy,
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
        self._check_that_tokens_are_left(params)
        num_prompt, limit = len(prompt_token_ids), self.max_model_len
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        if num_prompt + max_tokens > limit:
            room = self.spec.num_tokens_in(self.num_usable_blocks)
            why = f" The KV pool has room for {room} tokens." if room == limit < self.max_position else ""
            raise ContextLengthError(  # OpenAI's words, which clients search for
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} in the completion).{why}"
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
        if params.use_beam_search:
            self._check_beams(params)
        if params.num_samples > 1:
            self._check_samples(num_prompt, params)

    @cached_property
    def max_model_len(self) -> int:
        """How long a request may be, output included: what the spec says, or what pinned prefixes have left of it."""
        return min(self.spec.max_model_len, self.spec.num_tokens_in(self.num_usable_blocks))

    def max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """What was asked for, or as much as the context and, where samples share it, the pool can hold."""
        if params.max_tokens is not None:
            return params.max_tokens
        num_shared = num_prompt // self.spec.block_size
        num_tokens = self.spec.num_tokens_in(self.num_usable_blocks, params.num_samples, num_shared)
        return min(self.max_model_len, num_tokens + 1) - num_prompt

    def _check_that_tokens_are_left(self, params: SamplingParams) -> None:
        """Refuses what excludes every token from the start. What bad words of several tokens exclude shows later."""
        banned = {ids[0] for ids in bad_word_tokens(params.bad_words, self.tokenizer) if len(ids) == 1}
        if params.min_tokens:
            banned.update(params.stop_token_ids, () if params.ignore_eos else self.tokenizer.eos_token_ids)
        allowed = params.allowed_token_ids
        num_left = self.vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
        if num_left <= 0:
            name = "bad_words" if allowed is None else "allowed_token_ids"
            raise ValueError(
                f"{name} leaves no token to sample: bad_words, and with min_tokens the stop tokens, exclude all that are "
                "allowed"
            )

    def _check_beams(self, params: SamplingParams) -> None:
        num_stops = len(params.stop_token_ids) + (0 if params.ignore_eos else len(self.tokenizer.eos_token_ids))
        num_needed = num_candidates(params.n, num_stops)
        if num_needed > self.max_logprobs:
            raise ValueError(
                f"n is {params.n} beams, which need {num_needed} log-probs at each position with {num_stops} stop "
                f"tokens; the limit is {self.max_logprobs} (max_logprobs)"
            )

    def _check_samples(self, num_prompt: int, params: SamplingParams) -> None:
        name = "n" if params.best_of is None else "best_of"
        if params.num_samples > self.max_num_seqs:
            raise ValueError(f"{name} is {params.num_samples}; the limit is {self.max_num_seqs} (max_num_seqs)")
        if params.edits_logits and params.num_samples > self.max_num_edited_seqs:
            raise ValueError(
                f"{name} is {params.num_samples} with penalties, biases or bans; the limit is "
                f"{self.max_num_edited_seqs} (max_num_edited_seqs)"
            )
        max_tokens = max(self.max_tokens(num_prompt, params), params.min_tokens, 1)
        num_needed = self.spec.num_blocks_for_samples(num_prompt, max_tokens, params.num_samples)
        if num_needed > self.num_usable_blocks:
            raise ValueError(
                f"{params.num_samples} samples ({name}) of {num_prompt} prompt tokens and {max_tokens} more need "
                f"{num_needed} blocks of the KV pool; it has {self.num_usable_blocks}"
            )
