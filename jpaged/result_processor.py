"""ResultProcessor: the results of steps -> the deltas of requests."""

import logging
import time
from collections import Counter
from collections.abc import Mapping

from jpaged.metrics import EngineMetrics
from jpaged.model_runner import StepResult
from jpaged.output_processor import RequestState, best_tokens, token_logprobs
from jpaged.outputs import OutputDelta
from jpaged.scheduler import Scheduler
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence
from jpaged.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ResultProcessor:
    """Knows every request that has not ended, in `requests`, and ends them when their samples have ended.

    unmeasured: the ids of requests that are the engine's own.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, metrics: EngineMetrics, unmeasured: set[str]):
        self.scheduler, self.tokenizer, self.metrics, self.unmeasured = scheduler, tokenizer, metrics, unmeasured
        self.requests: dict[str, RequestState] = {}

    def process(self, appended: list[tuple[int, Sequence, list[int]]], result: StepResult) -> list[OutputDelta]:
        """What a step's result gives out; appended is what `Scheduler.update` says of it."""
        deltas, now = [], time.monotonic()
        gaps = Counter()  # most rows of a step waited equally long
        for row, seq, token_ids in appended:
            state = self.requests.get(seq.request_id)
            if state is None:  # another of its samples has just failed
                continue
            if seq.error is not None:
                deltas += self.fail(state, seq.error, {seq.index: token_ids})
                continue
            if seq.is_beam:
                deltas += self._advance_beams(state, seq, result, row, now)
                continue
            sample = state.samples[seq.index]
            if sample.last_token_time is not None:
                gaps[(now - sample.last_token_time) / len(token_ids)] += len(token_ids)
            elif state.metrics.first_token_time is None:
                state.metrics.first_token_time = now
            sample.last_token_time = now
            logprobs = None
            if seq.params.logprobs is not None:
                logprobs = [
                    token_logprobs(seq.params.logprobs, token_id, result, at, self.tokenizer)
                    for at, token_id in enumerate(token_ids, start=row)
                ]
            delta = sample.advance(token_ids, logprobs)
            if seq.params.is_ranked:
                sample.cumulative_logprob = sum(
                    result.logprobs.logprobs[row : row + len(token_ids)].tolist(), sample.cumulative_logprob
                )
            if delta.finish_reason is not None:
                self.scheduler.finish(seq, delta.finish_reason)  # does nothing where the scheduler has ended it
                seq.finish_reason, seq.stop_reason = delta.finish_reason, delta.stop_reason
            deltas += state.deliver(delta)
            if state.num_open == 0:
                self._close(state)
        for gap, num_tokens in gaps.items():
            self.metrics.on_inter_token_latency(gap, num_tokens)
        return deltas

    def take_prompt_logprobs(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Gives requests the log-probs of their prompts' tokens. Their rows come after those of the sampled tokens."""
        row = plan.num_sampled_rows
        for seq, first, end in plan.prompt_logprobs:
            state = self.requests.get(seq.request_id)
            if state is not None and (sample := state.samples[seq.index]).seq is seq:
                known = sample.prompt_logprobs
                assert len(known) == first + 1, f"{seq} has {len(known)} of its prompt"
                known += [
                    token_logprobs(seq.params.prompt_logprobs, token_id, result, at, self.tokenizer)
                    for at, token_id in enumerate(seq.token_ids[first + 1 : end + 1], start=row)
                ]
            row += end - first

    def give_up(
        self, state: RequestState, reason: str, error: str | None = None, token_ids: Mapping[int, list[int]] = {}
    ) -> list[OutputDelta]:
        """Ends a request's samples as they are, with the tokens that some still had; returns their last deltas."""
        for sample in state.samples:
            self.scheduler.finish(sample.seq, reason)
        deltas = state.give_up(reason, error, token_ids)
        self._close(state)
        return deltas

    def fail(self, state: RequestState, error: str, token_ids: Mapping[int, list[int]] = {}) -> list[OutputDelta]:
        """Gives up a request that cannot go on, and says why."""
        logger.error("request %s failed: %s", state.samples[0].seq.request_id, error)
        return self.give_up(state, FinishReason.ERROR, error, token_ids)

    def _advance_beams(
        self, state: RequestState, seq: Sequence, result: StepResult, row: int, now: float
    ) -> list[OutputDelta]:
        """Takes what a step says of one beam, and moves the beams when it was the last; deltas only at the end."""
        beams = state.beams
        state.metrics.first_token_time = state.metrics.first_token_time or now
        if not beams.report(seq.index, best_tokens(result, row, beams.num_candidates)):
            return []
        self.scheduler.beam_rows.mark_computed(beams.sequences)
        moves = beams.advance()
        if moves is not None:
            self.scheduler.beam_rows.move(beams.sequences, moves)
            return []
        deltas = []
        for sample, hypothesis in zip(state.samples, beams.hypotheses, strict=True):
            self.scheduler.finish(sample.seq, hypothesis.finish_reason)
            deltas += state.deliver(sample.become(hypothesis))
        self._close(state)
        return deltas

    def _close(self, state: RequestState) -> None:
        seqs = [sample.seq for sample in state.samples]
        del self.requests[seqs[0].request_id]
        state.metrics.finished_time = time.monotonic()
        if seqs[0].request_id in self.unmeasured:
            return
        num_generated = sum(seq.num_output_tokens for seq in seqs)
        self.metrics.on_finished(state.metrics, seqs[0].num_prompt_tokens, num_generated, seqs[-1].finish_reason)
