"""OutputProcessor: sampled tokens -> text, stop strings and log-probs, as deltas."""

from collections.abc import Collection, Mapping

from jpaged.beam_search import BeamSearch, Hypothesis
from jpaged.detokenizer import StopStringChecker
from jpaged.model_runner import StepResult
from jpaged.outputs import (
    CompletionOutput,
    Logprob,
    OutputDelta,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    merge_deltas,
)
from jpaged.sequence import FinishReason, Sequence
from jpaged.tokenizer import Tokenizer


class RequestState:
    """A request's samples, and the times of its life."""

    __slots__ = ("samples", "metrics", "num_open", "beams", "_held_back")

    def __init__(self, seqs: list[Sequence], tokenizer: Tokenizer, arrival_time: float):
        self.samples = [SampleState(seq, tokenizer) for seq in seqs]
        self.metrics = RequestMetrics(arrival_time)
        self.beams = BeamSearch(seqs) if seqs[0].is_beam else None
        self.num_open = len(seqs)  # samples that have not had their last delta
        self._held_back: list[list[OutputDelta]] | None = [[] for _ in seqs] if seqs[0].params.is_ranked else None

    def deliver(self, delta: OutputDelta) -> list[OutputDelta]:
        """The deltas that may be given out now that this one is there; of ranked samples, only when all have ended."""
        if delta.finish_reason is not None:
            self.samples[delta.index].is_open = False
            self.num_open -= 1
        if self._held_back is None:
            return [delta]
        self._held_back[delta.index].append(delta)
        return [] if self.num_open else self._best()

    def give_up(
        self, reason: str, error: str | None = None, token_ids: Mapping[int, list[int]] = {}
    ) -> list[OutputDelta]:
        """The last deltas of a request that ends before its time, with the tokens that samples, by their index, had
        before that. The caller ends the sequences."""
        ended = [
            sample.give_up(reason, error, token_ids.get(sample.seq.index, [])) for sample in self.samples if sample.is_open
        ]
        return [out for delta in ended for out in self.deliver(delta)]

    def _best(self) -> list[OutputDelta]:
        params = self.samples[0].seq.params
        ranked = sorted(self.samples, key=lambda sample: -sample.cumulative_logprob)
        deltas = [merge_deltas(self._held_back[sample.seq.index]) for sample in ranked]
        best, dropped = deltas[: params.n], deltas[params.n :]
        for rank, delta in enumerate(best):
            delta.index = rank
            delta.logprobs = None if params.logprobs is None else delta.logprobs
            delta.cumulative_logprob = ranked[rank].cumulative_logprob
        best[0].prompt_logprobs = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
        best[-1].num_dropped_tokens = sum(len(delta.token_ids) for delta in dropped)
        return best


class SampleState:
    """The text of one sample so far."""

    __slots__ = ("seq", "detokenizer", "stop_checker", "last_token_time", "cumulative_logprob", "prompt_logprobs", "is_open")

    def __init__(self, seq: Sequence, tokenizer: Tokenizer):
        params = seq.params
        self.seq = seq
        is_asked = params.prompt_logprobs is not None and seq.index == 0  # the first sample's are the request's
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if is_asked else None
        self.detokenizer = tokenizer.stream(params.skip_special_tokens, is_continuation=True)
        self.stop_checker = StopStringChecker(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self.last_token_time: float | None = None
        self.cumulative_logprob = 0.0  # kept where samples are ranked by it
        self.is_open = True

    def advance(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> OutputDelta:
        """The delta of the tokens that the sequence has more.

        Where one completes a stop string, it is the last, here and in the sequence; the delta says so and the caller
        ends the sequence.
        """
        seq, checker = self.seq, self.stop_checker
        num_before = seq.num_output_tokens - len(token_ids)
        text, may_stop = "", num_before >= seq.params.min_tokens
        for number, token_id in enumerate(token_ids, start=1):
            may_stop = num_before + number >= seq.params.min_tokens
            text += checker.push(self.detokenizer.push(token_id), may_stop=may_stop)
            if checker.stop_string is not None:
                del token_ids[number:], seq.token_ids[seq.num_prompt_tokens + num_before + number :]
                logprobs = logprobs and logprobs[:number]
                break
        if seq.is_finished:
            text += checker.push(self.detokenizer.flush(), may_stop=may_stop) + checker.flush()
        delta = OutputDelta(
            request_id=seq.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            num_cached_tokens=seq.num_cached_tokens or 0,
            index=seq.index,
        )
        self.prompt_logprobs = None
        if checker.stop_string is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, checker.stop_string
        return delta

    def become(self, hypothesis: Hypothesis) -> OutputDelta:
        """The only delta of a beam, when the search is over."""
        seq = self.seq
        seq.finish_reason, seq.stop_reason = hypothesis.finish_reason, hypothesis.stop_reason
        seq.token_ids[seq.num_prompt_tokens :] = hypothesis.token_ids
        delta = self.advance(hypothesis.token_ids, None)
        delta.cumulative_logprob = hypothesis.cumulative_logprob
        return delta

    def give_up(self, reason: str, error: str | None = None, token_ids: Collection[int] = ()) -> OutputDelta:
        """The last delta of a sample that ends before its time, with the tokens that it had before that."""
        text = "".join(map(self.detokenizer.push, token_ids)) + self.detokenizer.flush()
        return OutputDelta(
            self.seq.request_id,
            self.stop_checker.push(text, may_stop=False) + self.stop_checker.flush(),
            list(token_ids),
            finish_reason=reason,
            num_cached_tokens=self.seq.num_cached_tokens or 0,
            error=error,
            index=self.seq.index,
        )


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


def best_tokens(result: StepResult, row: int, count: int) -> list[tuple[int, float]]:
    """(token, log-prob) of the most likely ones, from row of a step's result."""
    sampled = result.logprobs
    return list(zip(sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()))


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
