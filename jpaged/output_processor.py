"""OutputProcessor: sampled tokens -> text, stop strings and log-probs, as deltas."""

from collections.abc import Mapping

from jpaged.detokenizer import StopStringChecker
from jpaged.model_runner import StepResult
from jpaged.outputs import CompletionOutput, Logprob, OutputDelta, RequestMetrics, RequestOutput, TokenLogprobs
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence
from jpaged.tokenizer import Tokenizer


class RequestState:
    """A request's text so far, and the times of its life."""

    __slots__ = ("seq", "prompt", "detokenizer", "stop_checker", "metrics", "last_token_time", "prompt_logprobs")

    def __init__(self, seq: Sequence, tokenizer: Tokenizer, prompt: str | None, arrival_time: float):
        params = seq.params
        self.seq = seq
        self.prompt = prompt
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
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
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )
        self.prompt_logprobs = None
        if checker.stop_string is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, checker.stop_string
        return delta

    def give_up(self, reason: str, error: str | None = None, token_ids: list[int] | None = None) -> OutputDelta:
        """The last delta of a request that ends before its time, with the tokens that it had before that."""
        text = "".join(map(self.detokenizer.push, token_ids or [])) + self.detokenizer.flush()
        text = self.stop_checker.push(text, may_stop=False) + self.stop_checker.flush()
        num_cached_tokens = self.seq.num_cached_tokens or 0
        return OutputDelta(
            self.seq.request_id, text, token_ids or [],
            finish_reason=reason, num_cached_tokens=num_cached_tokens, error=error,
        )  # fmt: skip


def take_prompt_logprobs(
    requests: Mapping[str, RequestState], plan: SchedulerOutput, result: StepResult, tokenizer: Tokenizer
) -> None:
    """Gives requests the log-probs of their prompts' tokens. Their rows come after those of the sampled tokens."""
    row = len(plan.sampled)
    for seq, first, end in plan.prompt_logprobs:
        state = requests.get(seq.request_id)
        if state is not None and state.seq is seq:
            assert len(state.prompt_logprobs) == first + 1, f"{seq} has {len(state.prompt_logprobs)} of its prompt"
            state.prompt_logprobs += [
                token_logprobs(seq.params.prompt_logprobs, token_id, result, at, tokenizer)
                for at, token_id in enumerate(seq.token_ids[first + 1 : end + 1], start=row)
            ]
        row += end - first


def token_logprobs(
    num_top: int | None, token_id: int, result: StepResult, row: int, tokenizer: Tokenizer
) -> TokenLogprobs | None:
    """A token's log-prob and the best num_top, from row of a step's result; None where num_top is."""
    if num_top is None:
        return None
    sampled = result.logprobs
    entries = {
        token_id: Logprob(float(sampled.logprobs[row]), int(sampled.ranks[row]), tokenizer.decoded_token(token_id))
    }
    best = zip(sampled.top_ids[row, :num_top].tolist(), sampled.top_logprobs[row].tolist())
    for rank, (top_id, logprob) in enumerate(best, start=1):
        entries.setdefault(top_id, Logprob(logprob, rank, tokenizer.decoded_token(top_id)))
    return entries


class RequestOutputBuilder:
    """Joins a request's deltas into the RequestOutput that they add up to."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int]):
        self.completion = CompletionOutput(index=0, text="", token_ids=[])
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, [self.completion])

    def add(self, delta: OutputDelta) -> RequestOutput:
        """The output so far: always the same object, grown in place."""
        completion = self.completion
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
            chosen = (entry[token].logprob for entry, token in zip(delta.logprobs, delta.token_ids))
            completion.cumulative_logprob = sum(chosen, completion.cumulative_logprob or 0.0)
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        completion.error = delta.error
        self.output.num_cached_tokens = delta.num_cached_tokens
        self.output.finished = delta.finish_reason is not None
        return self.output
