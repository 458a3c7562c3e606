"""What a request gives back: deltas while it runs, one RequestOutput in the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

TokenEntries = list[tuple[int, float, int]]
"""(token id, log-prob, rank) at one position: the chosen token first, then the best ones in order of rank."""


class TokenDelta(NamedTuple):
    """What one step added to one sample of a request, before it is text. The last one has a finish_reason.

    time: when the step's result came, in seconds of time.monotonic's clock. logprobs: of each token, where the request
    asks for them or its samples are ranked by them. num_cached_tokens and first_scheduled_time: in the first at least.
    """

    request_id: str
    index: int  # of the sample
    token_ids: list[int]
    time: float
    logprobs: list[TokenEntries] | None = None
    prompt_logprobs: list[TokenEntries | None] | None = None  # with the first token, of the whole prompt
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None  # of the request
    cumulative_logprob: float | None = None  # of a beam
    error: str | None = None
    is_bad_request: bool = False  # whether the error is the caller's fault


@dataclass(frozen=True)
class Logprob:
    """One candidate token at one position; rank 1 is the most likely.

    decoded_token: the token as text on its own; a piece of a character is named by its bytes ("bytes:\\xf0\\x9f").
    token_bytes: what it adds to the text: nothing where it is a special token that the text leaves out.
    """

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes


TokenLogprobs = dict[int, Logprob]
"""token id -> Logprob: the chosen token first, then the best ones in order of rank."""


@dataclass(slots=True)
class OutputDelta:
    """What one step added to one sample of a request. The last delta of each sample has a finish_reason.

    text may lag behind token_ids: an unfinished UTF-8 character, or what may be the head of a stop string, is held back.
    error is set, with finish_reason "error", when the engine had to give the request up; is_bad_request, where that is the
    caller's fault.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first token, of the whole prompt
    index: int = 0  # of the sample
    cumulative_logprob: float | None = None  # in the last delta of samples that were ranked
    num_dropped_tokens: int = 0  # generated for samples that were not among the best
    is_bad_request: bool = False


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """All the deltas of one sample as one."""
    last, logprobs = deltas[-1], [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=list(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation of a request. error says why the engine gave it up (finish_reason "error")."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times on time.monotonic's clock, in seconds; None until it has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with all that it has produced so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token, which nothing precedes
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
