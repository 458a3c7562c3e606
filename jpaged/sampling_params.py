"""SamplingParams: what one request asks of the sampler, checked once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

MIN_TEMPERATURE = 1e-5  # under it the division overflows: such a request is greedy
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_SAMPLES = 128
MAX_CACHE_SALT = 256  # characters


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    temperature 0 (under 1e-5) is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch those filters off; they apply in the order
    min_p, top_k, top_p, to the probabilities after temperature. A seed makes a request repeatable whatever else runs.
    max_tokens None means as many as the context allows. logprobs k returns the chosen token's log-probability and the k
    best, of the model's own distribution (before temperature and filters). Requests share cached prefixes only with those
    of the same cache_salt: a tenant's own, and hard to guess, keeps others from finding out by timing what it has asked. Of two
    requests that wait, the one of the lower priority number comes first, where the engine's scheduling_policy is priority.

    n samples are drawn from one prompt, each from a stream of its own: sample i of a seed is the same whatever n is. Of
    best_of samples the n with the highest cumulative log-probability are returned, best first.

    use_beam_search, at temperature 0, searches with n beams for the n outputs with the best cumulative log-probability over
    length ** length_penalty. early_stopping True ends as soon as n have ended; False, when none that still runs is
    better by its present length; "never", when none can become better.

    Raises ValueError that names the field, the value and the limit.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self):
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, Iterable) and (name == "stop" or not isinstance(value, str))),
                f"{name} must be a list, got {value!r}",
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name in ("temperature", "top_p", "min_p", "length_penalty"):
            value = getattr(self, name)
            _require(
                isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value),
                f"{name} must be a finite number, got {value!r}",
            )
        for name in ("n", "best_of", "top_k", "min_tokens", "seed", "max_tokens", "logprobs", "priority"):
            value = getattr(self, name)
            optional = name in ("best_of", "seed", "max_tokens", "logprobs")
            _require(
                (value is None and optional) or (isinstance(value, Integral) and not isinstance(value, bool)),
                f"{name} must be an integer, got {value!r}",
            )
        _require(1 <= self.n <= MAX_SAMPLES, f"n must be in [1, {MAX_SAMPLES}], got {self.n}")
        _require(
            self.best_of is None or self.n <= self.best_of <= MAX_SAMPLES,
            f"best_of must be in [n, {MAX_SAMPLES}] with n = {self.n}, got {self.best_of}",
        )
        _require(0 <= self.temperature <= 100, f"temperature must be in [0, 100], got {self.temperature}")
        _require(self.top_k >= -1, f"top_k must be -1 or 0 (off) or positive, got {self.top_k}")
        _require(self.top_k < 2**31, f"top_k must be under 2**31, got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, f"seed must fit in 64 bits, got {self.seed}")
        _require(
            self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"
        )
        _require(self.min_tokens >= 0, f"min_tokens must not be negative, got {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) must not be over max_tokens ({self.max_tokens})",
        )
        _require(self.logprobs is None or self.logprobs >= 0, f"logprobs must not be negative, got {self.logprobs}")
        _require(all(isinstance(s, str) and s for s in stop), f"stop must hold non-empty strings, got {list(stop)!r}")
        _require(len(stop) <= MAX_STOP_STRINGS, f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        _require(
            all(isinstance(t, Integral) and not isinstance(t, bool) and t >= 0 for t in self.stop_token_ids),
            f"stop_token_ids must hold token ids, got {list(self.stop_token_ids)!r}",
        )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
        )
        _require(-(2**63) <= self.priority < 2**63, f"priority must fit in 64 bits, got {self.priority}")
        salt = self.cache_salt
        _require(salt is None or isinstance(salt, str), f"cache_salt must be a string, got {salt!r}")
        _require(
            salt is None or 1 <= len(salt) <= MAX_CACHE_SALT,
            f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {len(salt or '')}",
        )

        self._check_beam_search()

    def _check_beam_search(self) -> None:
        _require(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            f"early_stopping must be true, false or 'never', got {self.early_stopping!r}",
        )
        for name, value, neutral in (
            ("length_penalty", self.length_penalty, 1.0), ("early_stopping", self.early_stopping, False)
        ):  # fmt: skip
            _require(self.use_beam_search or value == neutral, f"{name} ({value!r}) needs use_beam_search")
        if not self.use_beam_search:
            return
        _require(self.is_greedy, f"temperature must be 0 with use_beam_search, got {self.temperature}")
        for name, neutral in (("best_of", None), ("logprobs", None), ("min_tokens", 0), ("stop", ())):
            value = getattr(self, name)
            _require(value == neutral, f"{name} is not possible with use_beam_search, got {value!r}")

    @property
    def num_samples(self) -> int:
        """How many are drawn."""
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether samples are ranked by their log-probabilities, when all of them have ended."""
        return self.num_samples > self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether somebody has to see the log-probabilities of each token."""
        return self.logprobs is not None or self.is_ranked or self.use_beam_search

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE
