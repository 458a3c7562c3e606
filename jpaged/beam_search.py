"""BeamSearch: one request's beams, pruned on the host at every step. Results are those of Hugging Face's `generate`.

It knows nothing of blocks: what it decides, the scheduler does with fork, append and free.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jpaged.sequence import FinishReason, Sequence

IMPOSSIBLE = -1e9  # the score of a beam that does not exist


class Move(NamedTuple):
    """Beam `beam` goes on from what beam `parent` is, with one token more. A parent that goes on itself is its own."""

    beam: int
    parent: int
    token_id: int


@dataclass(frozen=True)
class Hypothesis:
    """A beam that has ended; its score is the cumulative log-prob over length ** length_penalty."""

    score: float
    cumulative_logprob: float
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None


class BeamSearch:
    """The beams of a group, one a sequence: all run, or none.

    At first all are the same, and only one of them counts. A step's best `num_candidates` tokens of every beam are
    reported; `advance` then chooses from all of them.
    """

    def __init__(self, sequences: list[Sequence]):
        first = sequences[0]
        self.sequences = sequences
        self.params, self.max_tokens, self.stop_token_ids = first.params, first.max_tokens, first.stop_token_ids
        self.scores = [0.0] + [IMPOSSIBLE] * (len(sequences) - 1)  # cumulative log-probs
        self.hypotheses: list[Hypothesis] = []  # the best that have ended, best first
        self._reported: dict[int, list[tuple[int, float]]] = {}

    @property
    def num_candidates(self) -> int:
        """The best tokens of each beam that decide: some may end it, and as many must be left as there are beams."""
        return num_candidates(len(self.sequences), len(self.stop_token_ids))

    def report(self, beam: int, candidates: list[tuple[int, float]]) -> bool:
        """Takes (token, log-prob) of a beam, best first; returns whether all beams are complete by now.

        They need not come in one step, and come again where a beam was preempted in between.
        """
        self._reported[beam] = candidates
        return len(self._reported) == len(self.sequences) and all(
            seq.num_computed_tokens == seq.num_tokens and not seq.num_pending for seq in self.sequences
        )

    def advance(self) -> list[Move] | None:
        """One move for each beam, or None when the search is over and `hypotheses` are its result."""
        width = len(self.sequences)
        length = self.sequences[0].num_output_tokens + 1
        candidates = sorted(
            (
                (self.scores[beam] + logprob, beam, token_id)
                for beam, best in self._reported.items()
                for token_id, logprob in best
            ),
            key=lambda candidate: (-candidate[0], candidate[1:]),
        )
        self._reported.clear()
        is_full = len(self.hypotheses) == width and self.params.early_stopping is True
        if not is_full:
            for score, beam, token_id in candidates[:width]:
                if token_id in self.stop_token_ids or length == self.max_tokens:
                    self._end(score, beam, token_id)
        if length == self.max_tokens:
            return None
        chosen = [candidate for candidate in candidates if candidate[2] not in self.stop_token_ids][:width]
        if not self._can_improve(chosen[0][0], length):
            return None
        return self._moves(chosen)

    def _end(self, cumulative_logprob: float, beam: int, token_id: int) -> None:
        """Keeps a beam that ends with this token, if it is among the best."""
        token_ids = [*self.sequences[beam].output_token_ids, token_id]
        stops = token_id in self.stop_token_ids
        hypothesis = Hypothesis(
            cumulative_logprob / len(token_ids) ** self.params.length_penalty,
            cumulative_logprob,
            token_ids,
            FinishReason.STOP if stops else FinishReason.LENGTH,
            token_id if token_id in self.params.stop_token_ids else None,
        )
        ranked = sorted([*self.hypotheses, hypothesis], key=lambda h: -h.score)
        self.hypotheses = ranked[: len(self.sequences)]

    def _can_improve(self, best_running: float, length: int) -> bool:
        """Whether going on may still change the result."""
        if len(self.hypotheses) < len(self.sequences):
            return True
        if self.params.early_stopping is True:
            return False
        penalty = self.params.length_penalty
        grows = self.params.early_stopping == "never" and penalty > 0  # then longer may be better
        return best_running / (self.max_tokens if grows else length) ** penalty > self.hypotheses[-1].score

    def _moves(self, chosen: list[tuple[float, int, int]]) -> list[Move]:
        """The first child of a beam takes its place, the others those of beams without any."""
        moves, others = {}, []
        for score, parent, token_id in chosen:
            if parent in moves:
                others.append((score, Move(-1, parent, token_id)))
            else:
                moves[parent] = score, Move(parent, parent, token_id)
        vacant = [beam for beam in range(len(self.sequences)) if beam not in moves]
        for beam, (score, move) in zip(vacant, others, strict=True):
            moves[beam] = score, move._replace(beam=beam)
        self.scores = [moves[beam][0] for beam in range(len(self.sequences))]
        return [moves[beam][1] for beam in range(len(self.sequences))]


def num_candidates(beam_width: int, num_stop_tokens: int) -> int:
    """How many of each beam's best tokens a search must see."""
    return beam_width + max(1, num_stop_tokens)
