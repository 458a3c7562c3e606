"""Drafter: guesses the next tokens of one sequence, as many as have been worth it lately."""

from jpaged.ngram import NgramIndex
from jpaged.speculative_config import SpeculativeConfig

WORTH_TRYING = 0.5  # a first draft token that is accepted less often costs more than it gains
WORTH_ADDING = 0.25  # and so does a further one
DECAY = 0.5  # of what is known of earlier drafts, with each that is verified
MAX_PAUSE = 64  # tokens between two attempts where nothing is ever accepted: 1.6 % more tokens to compute


class Drafter:
    """Of the draft tokens that were tested, one after another up to the first that was wrong, the recent part that
    was right is the chance of the next one. Where it falls under WORTH_TRYING the drafter rests, and then tries one
    token: after a second failure it rests twice as long, after a success it goes on as if nothing had happened before.
    """

    __slots__ = ("config", "_index", "_num_right", "_num_tested", "_pause", "_resume_at")

    def __init__(self, config: SpeculativeConfig):
        self.config = config
        self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._num_right = self._num_tested = 1.0
        self._pause = 1
        self._resume_at = 0

    def propose(self, token_ids: list[int], num_pending: int, limit: int) -> list[int]:
        """At most limit tokens to follow token_ids and the num_pending tokens after them that nobody has seen yet."""
        limit = min(limit, self._length)
        if limit < 1 or len(token_ids) < self._resume_at:
            return []
        return self._index.propose(token_ids, num_pending + limit)[num_pending:]

    def take_result(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Learns from a draft; num_tokens: how many the sequence has now."""
        self._num_right = DECAY * self._num_right + num_accepted
        self._num_tested = DECAY * self._num_tested + min(num_accepted + 1, num_drafted)
        if self._chance >= WORTH_TRYING:
            self._pause = 1
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self._resume_at = num_tokens + self._pause

    @property
    def _chance(self) -> float:
        return self._num_right / self._num_tested

    @property
    def _length(self) -> int:
        chance, length = self._chance, 1
        if chance >= WORTH_TRYING:
            while length < self.config.num_speculative_tokens and chance ** (length + 1) >= WORTH_ADDING:
                length += 1
        return length
