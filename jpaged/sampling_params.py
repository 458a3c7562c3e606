"""SamplingParams: what one request asks of the sampler, checked once."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

MIN_TEMPERATURE = 1e-5  # under it the division overflows: such a request is greedy
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_SAMPLES = 128
MAX_CACHE_SALT = 256  # characters
MAX_LOGIT_BIASES = 300
MAX_BAD_WORDS = 128
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS  # each as tokens with and without a space before it
MAX_BAD_WORD_TOKENS = 16

REALS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
)  # fmt: skip
INTEGERS = (
    "n", "best_of", "top_k", "min_tokens", "seed", "max_tokens", "logprobs", "prompt_logprobs", "priority",
)  # fmt: skip
BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    temperature 0 (under 1e-5) is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch those filters off; they apply in the order
    min_p, top_k, top_p, to the probabilities after temperature. A seed makes a request repeatable whatever else runs.
    max_tokens None means as many as the context allows. logprobs k returns the chosen token's log-probability and the k
    best, of the model's own distribution (before all that follows, temperature and filters). prompt_logprobs k returns
    the same of every token of the prompt but the first; with max_tokens 0 the prompt is scored and nothing generated.

    Requests share cached prefixes only with those of the same cache_salt: a tenant's own, and hard to guess, keeps others
    from finding out by timing what it has asked. Of two requests that wait, the one of the lower priority number comes
    first, where the engine's scheduling_policy is priority.

    Before temperature the logits are edited, in this order. logit_bias (token id -> number) is added; allowed_token_ids
    leaves no other token. repetition_penalty divides positive logits of tokens in prompt or output and multiplies
    negative ones; frequency_penalty is taken off once for each time that a token is in the output, presence_penalty
    once. bad_words are never completed: the last token of one is banned where the output ends in the others.

    logits_processors are functions (output token ids, logits float32[V]) -> logits that come before all of these. They
    run on the host: their request waits for each of its tokens, while others go on. Not over HTTP.

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: tuple[Callable, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self):
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logits_processors"):
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, Iterable) and (name == "stop" or not isinstance(value, str))),
                f"{name} must be a list, got {value!r}",
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors or ()))
        _require(
            all(map(callable, self.logits_processors)),
            f"logits_processors must hold functions, got {list(self.logits_processors)!r}",
        )
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in BOOLEANS:
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        for name in REALS:
            value = getattr(self, name)
            _require(
                isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value),
                f"{name} must be a finite number, got {value!r}",
            )
            object.__setattr__(self, name, value if isinstance(value, int) else float(value))
        for name in INTEGERS:
            value = getattr(self, name)
            if value is None and name not in ("n", "top_k", "min_tokens", "priority"):
                continue
            _require(_is_integer(value), f"{name} must be an integer, got {value!r}")
            object.__setattr__(self, name, int(value))
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
            self.max_tokens is None or self.max_tokens >= (1 if self.prompt_logprobs is None else 0),
            f"max_tokens must be at least 1, or 0 with prompt_logprobs, got {self.max_tokens}",
        )
        _require(self.min_tokens >= 0, f"min_tokens must not be negative, got {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) must not be over max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"{name} must not be negative, got {value}")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2], got {getattr(self, name)}")
        _require(
            0.01 <= self.repetition_penalty <= 100,
            f"repetition_penalty must be in [0.01, 100], got {self.repetition_penalty}",
        )
        _require(
            all(isinstance(word, str) and word for word in self.bad_words),
            f"bad_words must hold non-empty strings, got {list(self.bad_words)!r}",
        )
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS,
            f"bad_words takes at most {MAX_BAD_WORDS} strings, got {len(self.bad_words)}",
        )
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids must not be empty")
        _require(all(isinstance(s, str) and s for s in stop), f"stop must hold non-empty strings, got {list(stop)!r}")
        _require(len(stop) <= MAX_STOP_STRINGS, f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
        )
        _require(-10 <= self.length_penalty <= 10, f"length_penalty must be in [-10, 10], got {self.length_penalty}")
        _require(-(2**63) <= self.priority < 2**63, f"priority must fit in 64 bits, got {self.priority}")
        salt = self.cache_salt
        _require(salt is None or isinstance(salt, str), f"cache_salt must be a string, got {salt!r}")
        _require(
            salt is None or 1 <= len(salt) <= MAX_CACHE_SALT,
            f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {len(salt or '')}",
        )
        self._check_beam_search()

    def _check_beam_search(self) -> None:
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(is_known, f"early_stopping must be true, false or 'never', got {self.early_stopping!r}")
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
        _require(not self.edits_logits, "penalties, biases, bans and logits_processors are not possible with use_beam_search")

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

    @property
    def edits_logits(self) -> bool:
        """Whether it needs state as wide as the vocabulary (`LogitsEdits`)."""
        has_penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        has_ban = self.allowed_token_ids is not None or self.bad_words
        return bool(has_penalty or has_ban or self.logit_bias or self.logits_processors)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _token_ids(name: str, given: Iterable) -> tuple[int, ...]:
    ids = tuple(given)
    wrong = next((i for i in ids if not _is_integer(i) or i < 0), None)
    _require(wrong is None, f"{name} must hold token ids, got {wrong!r}")
    return tuple(map(int, ids))


def _biases(given: object) -> dict[int, float]:
    """logit_bias with integers as keys: JSON has only strings for them."""
    _require(given is None or isinstance(given, Mapping), f"logit_bias must map token ids to numbers, got {given!r}")
    biases = {}
    for key, value in (given or {}).items():
        is_text = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12
        _require(is_text or (_is_integer(key) and key >= 0), f"logit_bias must have token ids as keys, got {key!r}")
        token_id = int(key)
        _require(token_id not in biases, f"logit_bias names token {token_id} twice")
        _require(
            isinstance(value, Real) and not isinstance(value, bool) and -100 <= value <= 100,
            f"logit_bias must hold numbers in [-100, 100], got {value!r} for token {token_id}",
        )
        biases[token_id] = float(value)
    _require(len(biases) <= MAX_LOGIT_BIASES, f"logit_bias takes at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    return biases
