"""EngineConfig: what the user decides."""

import math
from dataclasses import dataclass, field, fields
from numbers import Integral

from jpaged.speculative_config import SpeculativeConfig

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_BLOCK_SIZE = {"cpu": 64}  # by platform; 16 elsewhere
POOL_DTYPES = {  # by the names of kv_cache_dtype
    "bfloat16": "bfloat16", "float32": "float32", "int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
}  # fmt: skip
MIN_TOKEN_BUCKET = 2  # one row is a cliff for XLA:CPU's bfloat16 matmuls


_LEAST = {  # the counts, and the least that each may be
    "max_model_len": 1,
    "block_size": 1,
    "num_blocks_override": 2,  # one is the null block
    "kv_cache_memory_bytes": 1,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_num_queued_requests": 1,
    "max_num_edited_seqs": 1,
    "max_logprobs": 0,
    "num_scheduler_steps": 1,
    "tensor_parallel_size": 1,
}


def _option(default, help, **metadata):
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every knob of the engine; the server's flags are these fields with dashes.

    Raises ValueError that names the field, the value and the limit, for a combination that cannot work.
    """

    model: str = _option(DEFAULT_MODEL, "a known name, a .gguf file, a Hugging Face folder, or a hub id")
    served_model_name: tuple[str, ...] = _option((), "names that clients may use for the model (default: --model)")
    revision: str | None = _option(None, "the hub revision to load")
    download_dir: str | None = _option(None, "where downloaded models are kept (default: the user's cache)")
    generation_config: str = _option(
        "auto", "auto: the model's own sampling defaults; none: OpenAI's", choices=("auto", "none")
    )
    chat_template: str | None = _option(None, "a Jinja file that replaces the model's own chat template")
    dtype: str = _option("auto", "of weights and matmuls; auto is bfloat16", choices=("auto", "bfloat16", "float32"))
    seed: int = _option(0, "seeds requests that bring no seed of their own")

    max_model_len: int | None = _option(
        None, "tokens of prompt and output together (default: the model's context, or what the pool holds)"
    )
    block_size: int | None = _option(
        None,
        "tokens in a block of the KV pool (default: 64 on CPU, where attention over blocks of 16 takes twice as long; else 16)",
    )
    num_blocks_override: int | None = _option(None, "blocks in the pool, instead of what memory allows")
    kv_cache_memory_bytes: int | None = _option(
        None, "bytes for the KV pool (default: on an accelerator what is free, on CPU 1 GiB)"
    )
    kv_cache_dtype: str = _option(
        "auto",
        "of the KV pool; auto is the dtype of the weights; int8 and fp8 (e4m3) hold twice the tokens of bfloat16, rounded",
        choices=("auto", *POOL_DTYPES),
    )
    device_memory_utilization: float = _option(0.92, "part of an accelerator's memory that the engine may use")
    enable_prefix_caching: bool = _option(True, "share the KV blocks of equal prefixes")

    pin_prefix: tuple[str, ...] = _option(
        (), "text files of prompts' beginnings that are computed once and stay in the KV pool"
    )

    max_num_batched_tokens: int = _option(512, "tokens that one step computes at most")
    token_buckets: tuple[int, ...] = _option(
        (), "padded step sizes to compile for; the largest is max_num_batched_tokens (default: a ladder)"
    )
    max_num_seqs: int = _option(256, "sequences that run at once at most")
    max_num_edited_seqs: int = _option(
        64,
        "sequences with penalties, logit_bias, allowed_token_ids, bad_words or logits processors that run at once at "
        "most: each keeps 12 bytes a token of the vocabulary on the device",
    )
    max_num_queued_requests: int | None = _option(None, "requests that may wait; more are refused (default: no limit)")
    preemption_mode: str = _option(
        "auto",
        "how a request that had to give way comes back: its tokens are computed again, or its blocks wait in host memory; "
        "auto: whatever is estimated to be cheaper",
        choices=("auto", "recompute", "swap"),
    )
    swap_space: float = _option(4, "GiB of host memory at most for the blocks of requests that gave way")
    scheduling_policy: str = _option(
        "fcfs", "fcfs: first come, first served; priority: requests' priority first", choices=("fcfs", "priority")
    )
    enable_chunked_prefill: bool = _option(True, "split prompts over steps and mix them with decodes")
    num_scheduler_steps: int = _option(
        1, "decodes that the device may run in a row before the host is asked, where every sequence allows it"
    )
    speculative_config: SpeculativeConfig | None = _option(
        None,
        "guess tokens ahead and verify them in one step, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}',
        metavar="JSON",
    )
    async_scheduling: bool = _option(True, "plan the next step while the device runs the present one")
    max_logprobs: int = _option(20, "the most log-probs that a request may ask for at a position")

    tensor_parallel_size: int = _option(1, "devices that share each layer")
    attention_backend: str | None = _option(
        None,
        "the attention implementation (default: by device)",
        choices=("mosaic_gpu", "mosaic_tpu", "xla", "reference"),
    )
    check_kernels: bool = _option(
        False,
        "compare some steps' attention with plain XLA and check every block id; stop where one is wrong (debugging)",
    )
    compilation_cache_dir: str | None = _option(None, "where compiled programs are kept (default: the user's cache)")

    def __post_init__(self):
        for f in fields(self):
            choices = f.metadata.get("choices")
            value = getattr(self, f.name)
            if choices and value is not None and value not in choices:
                raise ValueError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}")
        object.__setattr__(self, "served_model_name", tuple(self.served_model_name))
        object.__setattr__(self, "pin_prefix", tuple(self.pin_prefix))
        object.__setattr__(self, "token_buckets", tuple(sorted(set(self.token_buckets))))
        for name, least in _LEAST.items():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value is None and default is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 < self.device_memory_utilization <= 1:
            raise ValueError(f"device_memory_utilization must be in (0, 1], got {self.device_memory_utilization}")
        if not 0 <= self.swap_space < math.inf:
            raise ValueError(f"swap_space must be a number of GiB, 0 or more, got {self.swap_space}")
        if self.max_num_batched_tokens < max(self.max_num_seqs, MIN_TOKEN_BUCKET):
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}) and {MIN_TOKEN_BUCKET}: every running sequence needs a token each step"
            )
        if self.token_buckets and self.token_buckets[0] < MIN_TOKEN_BUCKET:
            raise ValueError(f"token_buckets must be at least {MIN_TOKEN_BUCKET}, got {self.token_buckets[0]}")
        if self.token_buckets and self.token_buckets[-1] != self.max_num_batched_tokens:
            raise ValueError(
                f"the largest of token_buckets ({self.token_buckets[-1]}) must be max_num_batched_tokens "
                f"({self.max_num_batched_tokens})"
            )
        if self.speculative_config is not None:
            self._check_speculation()

    def _check_speculation(self) -> None:
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        if self.num_scheduler_steps > 1:
            raise ValueError(
                f"num_scheduler_steps ({self.num_scheduler_steps}) must be 1 with speculative_config: the host sees "
                "each draft's result before the next"
            )
        num_drafted = self.speculative_config.num_speculative_tokens
        if self.max_num_batched_tokens < self.max_num_seqs + num_drafted:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}) and num_speculative_tokens ({num_drafted}) together"
            )

    @property
    def max_num_rows(self) -> int:
        """The most rows of logits that a step has: one a sequence, and one for each draft token."""
        if self.speculative_config is None:
            return self.max_num_seqs
        num_drafted = self.speculative_config.num_speculative_tokens
        return min(self.max_num_seqs * (1 + num_drafted), self.max_num_batched_tokens)

    def block_size_on(self, platform: str) -> int:
        """The block size that was asked for, or the platform's own."""
        return self.block_size or DEFAULT_BLOCK_SIZE.get(platform, 16)
