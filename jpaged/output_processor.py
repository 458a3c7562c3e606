"""OutputProcessor: a request's token deltas -> text, stop strings, log-probs with their tokens' text, and ranks."""

import time
from collections.abc import Callable

from jpaged.detokenizer import StopStringChecker
from jpaged.metrics import EngineMetrics
from jpaged.outputs import (
    CompletionOutput,
    Logprob,
    OutputDelta,
    RequestMetrics,
    RequestOutput,
    TokenDelta,
    TokenEntries,
    TokenLogprobs,
    merge_deltas,
)
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason
from jpaged.tokenizer import Tokenizer


class OutputProcessor:
    """What is made of one request by whoever reads it, and counted in metrics when it has ended.

    stop: called with the index of a sample that has come to a stop string before the engine has ended it. What the
    engine still says of it is surplus, and dropped.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        stop: Callable[[int], None],
        arrival_time: float | None = None,
    ):
        self.request_id, self.params = request_id, params
        self.times = RequestMetrics(time.monotonic() if arrival_time is None else arrival_time)
        self._num_prompt_tokens = num_prompt_tokens
        self._tokenizer, self._metrics, self._stop = tokenizer, metrics, stop
        self._samples = [SampleText(request_id, index, params, tokenizer) for index in range(params.num_samples)]
        self._num_open = len(self._samples)
        self._held_back: list[list[OutputDelta]] | None = [[] for _ in self._samples] if params.is_ranked else None

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    def process(self, delta: TokenDelta) -> list[OutputDelta]:
        """The deltas that may be given out now; of ranked samples, only when all have ended."""
        sample, times = self._samples[delta.index], self.times
        if sample.finish_reason is not None:
            return []
        if delta.token_ids:
            if sample.last_token_time is not None:
                num_tokens = len(delta.token_ids)
                self._metrics.on_inter_token_latency((delta.time - sample.last_token_time) / num_tokens, num_tokens)
            elif times.first_token_time is None:
                times.first_token_time = delta.time
            sample.last_token_time = delta.time
        times.first_scheduled_time = times.first_scheduled_time or delta.first_scheduled_time
        output = sample.advance(delta)
        if self.params.logprobs is not None and delta.logprobs is not None:
            output.logprobs = self._named(delta.logprobs[: len(output.token_ids)])
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = self._named(delta.prompt_logprobs)
        if output.finish_reason is not None:
            self._num_open -= 1
            if delta.finish_reason is None:
                self._stop(delta.index)
            if self.is_finished:
                times.finished_time = delta.time
                self._count(output.finish_reason)
        if self._held_back is None:
            return [output]
        self._held_back[delta.index].append(output)
        return self._best() if self.is_finished else []

    def end(self, reason: str, error: str | None = None) -> list[OutputDelta]:
        """The last deltas of a request of which the engine will say no more."""
        now = time.monotonic()
        last = [
            TokenDelta(self.request_id, s.index, [], now, finish_reason=reason, error=error)
            for s in self._samples
            if s.finish_reason is None
        ]
        return [output for delta in last for output in self.process(delta)]

    def _named(self, entries: list[TokenEntries | None]) -> list[TokenLogprobs | None]:
        described = self._described
        return [
            at and {token_id: Logprob(logprob, rank, *described(token_id)) for token_id, logprob, rank in at}
            for at in entries
        ]

    def _described(self, token_id: int) -> tuple[str, bytes]:
        """A token's name, and what it adds to the text."""
        tokenizer = self._tokenizer
        is_shown = not self.params.skip_special_tokens or token_id not in tokenizer.special_token_ids
        return tokenizer.decoded_token(token_id), tokenizer.token_bytes(token_id) if is_shown else b""

    def _count(self, finish_reason: str) -> None:
        num_generated = sum(sample.num_tokens for sample in self._samples)
        self._metrics.on_finished(self.times, self._num_prompt_tokens, num_generated, finish_reason)

    def _best(self) -> list[OutputDelta]:
        ranked = sorted(self._samples, key=lambda sample: -sample.cumulative_logprob)
        deltas = [merge_deltas(self._held_back[sample.index]) for sample in ranked]
        best, dropped = deltas[: self.params.n], deltas[self.params.n :]
        for rank, delta in enumerate(best):
            delta.index = rank
            delta.cumulative_logprob = ranked[rank].cumulative_logprob
        best[0].prompt_logprobs = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
        best[-1].num_dropped_tokens = sum(len(delta.token_ids) for delta in dropped)
        return best


class SampleText:
    """The text of one sample so far."""

    __slots__ = (
        "request_id", "index", "num_tokens", "cumulative_logprob", "last_token_time", "finish_reason", "_min_tokens",
        "_detokenizer", "_stop_checker", "_num_cached_tokens",
    )  # fmt: skip

    def __init__(self, request_id: str, index: int, params: SamplingParams, tokenizer: Tokenizer):
        self.request_id, self.index = request_id, index
        self.num_tokens = 0
        self.cumulative_logprob = 0.0  # where the engine tells the tokens' log-probs
        self.last_token_time: float | None = None
        self.finish_reason: str | None = None
        self._min_tokens = params.min_tokens
        self._num_cached_tokens = 0
        self._detokenizer = tokenizer.stream(params.skip_special_tokens, is_continuation=True)
        self._stop_checker = StopStringChecker(
            params.stop, include_stop_str_in_output=params.include_stop_str_in_output
        )

    def advance(self, delta: TokenDelta) -> OutputDelta:
        """The same with text and without log-probs. The token that completes a stop string is the last, wherever the
        engine went on to."""
        token_ids, checker = delta.token_ids, self._stop_checker
        is_given_up = delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        text, may_stop = "", not is_given_up and self.num_tokens >= self._min_tokens
        for number, token_id in enumerate(token_ids, start=1):
            may_stop = not is_given_up and self.num_tokens + number >= self._min_tokens
            text += checker.push(self._detokenizer.push(token_id), may_stop=may_stop)
            if checker.stop_string is not None:
                token_ids = token_ids[:number]
                break
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if reason is not None:
            text += checker.push(self._detokenizer.flush(), may_stop=may_stop) + checker.flush()
        if checker.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, checker.stop_string
        if delta.logprobs is not None:
            self.cumulative_logprob = sum(
                (entries[0][1] for entries in delta.logprobs[: len(token_ids)]), self.cumulative_logprob
            )
        self.num_tokens += len(token_ids)
        self.finish_reason = reason
        self._num_cached_tokens = delta.num_cached_tokens or self._num_cached_tokens
        return OutputDelta(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=self._num_cached_tokens,
            error=delta.error,
            is_bad_request=delta.is_bad_request,
            index=self.index,
            cumulative_logprob=delta.cumulative_logprob,
        )


class RequestOutputBuilder:
    """Joins a request's deltas into the RequestOutput that they add up to."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int = 1):
        completions = [CompletionOutput(index, text="", token_ids=[]) for index in range(n)]
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, completions)
        self._num_open = n

    def add(self, delta: OutputDelta) -> RequestOutput:
        """The output so far: always the same object, grown in place."""
        completion = self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
            chosen = (entry[token].logprob for entry, token in zip(delta.logprobs, delta.token_ids))
            completion.cumulative_logprob = sum(chosen, completion.cumulative_logprob or 0.0)
        if delta.cumulative_logprob is not None:
            completion.cumulative_logprob = delta.cumulative_logprob
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        completion.error = delta.error
        self.output.num_cached_tokens = delta.num_cached_tokens
        self._num_open -= delta.finish_reason is not None
        self.output.finished = self._num_open == 0
        return self.output
