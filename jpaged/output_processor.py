"""OutputProcessor: sampled tokens -> text, stop strings and log-probs, as deltas."""

from jpaged.detokenizer import StopStringChecker
from jpaged.model_runner import StepResult
from jpaged.outputs import CompletionOutput, Logprob, OutputDelta, RequestMetrics, RequestOutput, TokenLogprobs
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason, Sequence
from jpaged.tokenizer import Tokenizer


class RequestState:
    """A request's text so far, and the times of its life."""

    __slots__ = ("seq", "prompt", "detokenizer", "stop_checker", "metrics", "last_token_time")

    def __init__(self, seq: Sequence, tokenizer: Tokenizer, prompt: str | None, arrival_time: float):
        params = seq.params
        self.seq = seq
        self.prompt = prompt
        self.detokenizer = tokenizer.stream(params.skip_special_tokens, is_continuation=True)
        self.stop_checker = StopStringChecker(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self.metrics = RequestMetrics(arrival_time)
        self.last_token_time = arrival_time

    def advance(self, token_ids: list[int], logprobs: TokenLogprobs | None) -> OutputDelta:
        """The delta of one more token, or of several where the request has neither stop strings nor log-probs.

        Where it completes a stop string, the delta says so and the caller ends the sequence.
        """
        seq, checker = self.seq, self.stop_checker
        may_stop = seq.num_output_tokens >= seq.params.min_tokens
        text = checker.push("".join(map(self.detokenizer.push, token_ids)), may_stop=may_stop)
        if seq.is_finished:
            text += checker.push(self.detokenizer.flush(), may_stop=may_stop) + checker.flush()
        delta = OutputDelta(
            request_id=seq.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=None if logprobs is None else [logprobs],
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )
        if checker.stop_string is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, checker.stop_string
        return delta

    def give_up(self, reason: str, error: str | None = None) -> OutputDelta:
        """The last delta of a request that ends without a token."""
        text = self.stop_checker.push(self.detokenizer.flush(), may_stop=False) + self.stop_checker.flush()
        num_cached_tokens = self.seq.num_cached_tokens or 0
        return OutputDelta(
            self.seq.request_id, text, [], finish_reason=reason, num_cached_tokens=num_cached_tokens, error=error
        )


def token_logprobs(
    params: SamplingParams, token_id: int, result: StepResult, row: int, tokenizer: Tokenizer
) -> TokenLogprobs | None:
    """The chosen token's log-prob and the best params.logprobs, from row of a step's result."""
    if params.logprobs is None:
        return None
    sampled = result.logprobs
    entries = {
        token_id: Logprob(float(sampled.logprobs[row]), int(sampled.ranks[row]), tokenizer.decoded_token(token_id))
    }
    best = zip(sampled.top_ids[row, : params.logprobs].tolist(), sampled.top_logprobs[row].tolist())
    for rank, (top_id, logprob) in enumerate(best, start=1):
        entries.setdefault(top_id, Logprob(logprob, rank, tokenizer.decoded_token(top_id)))
    return entries


class RequestOutputBuilder:
    """Joins a request's deltas into the RequestOutput that they add up to."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int]):
        self.completion = CompletionOutput(index=0, text="", token_ids=[])
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, [self.completion])

    def add(self, delta: OutputDelta) -> RequestOutput:
        """The output so far: always the same object, grown in place.

        Raises RuntimeError where the engine gave the request up.
        """
        if delta.error is not None:
            raise RuntimeError(f"request {delta.request_id}: {delta.error}")
        completion = self.completion
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
            chosen = (entry[token].logprob for entry, token in zip(delta.logprobs, delta.token_ids))
            completion.cumulative_logprob = sum(chosen, completion.cumulative_logprob or 0.0)
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        self.output.num_cached_tokens = delta.num_cached_tokens
        self.output.finished = delta.finish_reason is not None
        return self.output
