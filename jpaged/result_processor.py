"""ResultProcessor: the results of steps -> the token deltas of requests."""

import logging
import time
from collections.abc import Mapping

from jpaged.beam_search import BeamSearch
from jpaged.errors import NOTHING_ALLOWED, TOKEN_ERRORS
from jpaged.model_runner import StepResult
from jpaged.outputs import TokenDelta, TokenEntries
from jpaged.scheduler import Scheduler
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence

logger = logging.getLogger(__name__)


class RequestState:
    """A request's sequences, and those of them, by their index, that have not had their last delta.

    has_only_tokens: what is left to say of a request before its end is its one sample's tokens.
    """

    __slots__ = ("seqs", "open", "has_only_tokens", "beams", "prompt_logprobs", "first_scheduled_time")

    def __init__(self, seqs: list[Sequence]):
        self.seqs = seqs
        self.open = set(range(len(seqs)))
        self.has_only_tokens = False
        self.beams = BeamSearch(seqs) if seqs[0].is_beam else None
        self.prompt_logprobs: list[TokenEntries | None] | None = (
            None if seqs[0].params.prompt_logprobs is None else [None]
        )
        self.first_scheduled_time: float | None = None


class ResultProcessor:
    """Knows every request that has not ended, in `requests`, and ends them when their samples have ended."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.requests: dict[str, RequestState] = {}

    def start_over(self, scheduler: Scheduler) -> None:
        """Queues every sample that has not ended in a scheduler that knows of none, to be computed from the start."""
        self.scheduler = scheduler
        for state in self.requests.values():
            if state.prompt_logprobs is not None:
                state.seqs[0].num_prompt_logprobs = len(state.prompt_logprobs) - 1
            for seq in state.seqs:
                if not seq.is_finished:
                    seq.start_over()
                    scheduler.add(seq)

    def process(self, appended: list[tuple[int, Sequence, list[int]]], result: StepResult) -> list[TokenDelta]:
        """What a step's result gives out; appended is what `Scheduler.update` says of it."""
        deltas, now = [], time.monotonic()
        for row, seq, token_ids in appended:
            state = self.requests.get(seq.request_id)
            if state is None:  # another of its samples has just failed
                continue
            if state.has_only_tokens and seq.finish_reason is None:
                deltas.append(TokenDelta(seq.request_id, 0, token_ids, now))
            elif seq.error is not None:
                is_bad_request = seq.error == TOKEN_ERRORS[NOTHING_ALLOWED]
                deltas += self.fail(state, seq.error, {seq.index: token_ids}, is_bad_request=is_bad_request)
            elif seq.is_beam:
                deltas += self._advance_beams(state, seq, result, row, now)
            elif seq.params.needs_logprobs:
                logprobs = [
                    token_entries(seq.params.logprobs or 0, token_id, result, at)
                    for at, token_id in enumerate(token_ids, start=row)
                ]
                deltas.append(self._delta(state, seq, token_ids, now, logprobs))
            else:
                deltas.append(self._delta(state, seq, token_ids, now, None))
                state.has_only_tokens = len(state.seqs) == 1
        return deltas

    def take_prompt_logprobs(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Gives requests the log-probs of their prompts' tokens. Their rows come after those of the sampled tokens."""
        row = plan.num_sampled_rows
        for seq, first, end in plan.prompt_logprobs:
            state = self.requests.get(seq.request_id)
            if state is not None and state.seqs[seq.index] is seq:
                known = state.prompt_logprobs
                assert len(known) == first + 1, f"{seq} has {len(known)} of its prompt"
                known += [
                    token_entries(seq.params.prompt_logprobs, token_id, result, at)
                    for at, token_id in enumerate(seq.token_ids[first + 1 : end + 1], start=row)
                ]
            row += end - first

    def give_up(
        self, state: RequestState, reason: str, token_ids: Mapping[int, list[int]] = {}, **why: object
    ) -> list[TokenDelta]:
        """Ends a request's samples as they are, with the tokens that some still had; returns their last deltas.

        why: the deltas' fields that say more of the reason.
        """
        now = time.monotonic()
        for seq in state.seqs:
            self.scheduler.finish(seq, reason)
        ended = {"finish_reason": reason, "stop_reason": None, "prompt_logprobs": None, **why}
        open_seqs = [state.seqs[index] for index in sorted(state.open)]
        return [self._delta(state, seq, token_ids.get(seq.index, []), now, None)._replace(**ended) for seq in open_seqs]

    def fail(
        self,
        state: RequestState,
        error: str,
        token_ids: Mapping[int, list[int]] = {},
        *,
        is_bad_request: bool = False,
    ) -> list[TokenDelta]:
        """Gives up a request that cannot go on, and says why. What the caller did wrong is no concern of the operator."""
        logger.log(
            logging.INFO if is_bad_request else logging.ERROR,
            "request %s failed: %s", state.seqs[0].request_id, error,
        )  # fmt: skip
        return self.give_up(state, FinishReason.ERROR, token_ids, error=error, is_bad_request=is_bad_request)

    def stop(self, state: RequestState, index: int) -> None:
        """Ends a sample in whose text a stop string was found. Nothing more is said of it; one that has ended is left
        alone."""
        if index in state.open:
            self.scheduler.finish(state.seqs[index], FinishReason.STOP)
            self._close(state, index)

    def _advance_beams(
        self, state: RequestState, seq: Sequence, result: StepResult, row: int, now: float
    ) -> list[TokenDelta]:
        """Takes what a step says of one beam, and moves the beams when it was the last; deltas only at the end."""
        beams = state.beams
        if not beams.report(seq.index, best_tokens(result, row, beams.num_candidates)):
            return []
        self.scheduler.beam_rows.mark_computed(beams.sequences)
        moves = beams.advance()
        if moves is not None:
            self.scheduler.beam_rows.move(beams.sequences, moves)
            return []
        deltas = []
        for beam, hypothesis in zip(state.seqs, beams.hypotheses, strict=True):
            self.scheduler.finish(beam, hypothesis.finish_reason)
            beam.stop_reason = hypothesis.stop_reason
            delta = self._delta(state, beam, hypothesis.token_ids, now, None)
            deltas.append(delta._replace(cumulative_logprob=hypothesis.cumulative_logprob))
        return deltas

    def _delta(
        self, state: RequestState, seq: Sequence, token_ids: list[int], now: float, logprobs: list[TokenEntries] | None
    ) -> TokenDelta:
        if seq.finish_reason is not None:
            self._close(state, seq.index)
        prompt_logprobs = state.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs, state.prompt_logprobs = (None, prompt_logprobs) if seq.index else (prompt_logprobs, None)
        return TokenDelta(
            seq.request_id, seq.index, token_ids, now, logprobs, prompt_logprobs, seq.finish_reason, seq.stop_reason,
            seq.num_cached_tokens or 0, state.first_scheduled_time,
        )  # fmt: skip

    def _close(self, state: RequestState, index: int) -> None:
        state.open.remove(index)
        if not state.open:
            del self.requests[state.seqs[0].request_id]


def token_entries(num_top: int, token_id: int, result: StepResult, row: int) -> TokenEntries:
    """A token's log-prob and the best num_top, from row of a step's result."""
    sampled = result.logprobs
    best = zip(sampled.top_ids[row, :num_top].tolist(), sampled.top_logprobs[row].tolist())
    chosen = token_id, float(sampled.logprobs[row]), int(sampled.ranks[row])
    return [chosen, *((top, logprob, rank) for rank, (top, logprob) in enumerate(best, start=1) if top != token_id)]


def best_tokens(result: StepResult, row: int, count: int) -> list[tuple[int, float]]:
    """(token, log-prob) of the most likely ones, from row of a step's result."""
    sampled = result.logprobs
    return list(zip(sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()))
