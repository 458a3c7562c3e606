"""Speculation: which sequences of a step get a draft, and what is left of it afterwards.

A draft needs no rejection sampling: a token's randomness is a function of seed, sample and position alone, so what the
step draws after a right token is what it would have drawn anyway. The draft is accepted as far as the draws equal it,
and the draw after that is the next token. KV of tokens that were not accepted lies after the computed ones and is
overwritten.
"""

from jpaged.config import EngineConfig
from jpaged.drafter import Drafter
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import Sequence


class Speculation:
    """That of one engine; without `speculative_config` nothing is ever drafted."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager):
        self._config = config.speculative_config
        self._kv = kv
        self._max_draft_tokens = config.max_num_rows - config.max_num_seqs  # every other sequence may need a row

    def drafter_for(self, params: SamplingParams) -> Drafter | None:
        """None for beams, which the host moves at every token, and for a request whose logits depend on the tokens before
        in a way that only the device counts."""
        if self._config is None or params.use_beam_search or params.edits_logits:
            return None
        return Drafter(self._config)

    def must_wait(self, num_verified: int, num_running: int) -> bool:
        """Whether too many sequences sit out until the results of their drafts are there for the others to go on without.

        Those that sit out lose a step of the others. Where nobody goes on, everybody loses the moment that the host
        needs between two steps, which is an eighth of a step or less.
        """
        return 8 * num_verified > num_running

    def draft(self, seq: Sequence, num_tokens: int, num_running: int, plan: SchedulerOutput) -> list[int]:
        """Plans a draft of at most num_tokens tokens, with slots for it, after the one token that seq has to compute, and
        returns it; none where nothing comes to mind, or where a running sequence needs the block for its next token."""
        num_left = self._max_draft_tokens - plan.num_draft_tokens
        limit = min(num_tokens, num_left, seq.num_tokens_left - 1)
        draft = seq.drafter.propose(seq.token_ids, seq.num_pending, limit)
        if not draft:
            return []
        num_new = self._kv.num_missing(seq, 1 + len(draft))
        if num_new > 0 and num_new + num_running * self._kv.num_groups > self._kv.pool.num_free:
            return []
        if self._kv.allocate_slots(seq, 1 + len(draft)) is None:
            return []
        plan.drafts[seq] = draft
        plan.num_draft_tokens += len(draft)
        return draft

    def verify(self, plan: SchedulerOutput, token_ids: list[list[int]]) -> list[list[int]]:
        """From the tokens of each row of a step to those of each of plan.sampled.

        What is accepted counts as computed, and plan.limits say how many tokens each sequence has.
        """
        tokens = []
        for index, (seq, row) in enumerate(zip(plan.sampled, plan.first_rows)):
            draft = plan.drafts.get(seq, ())
            drawn = [token for of_row in token_ids[row : row + 1 + len(draft)] for token in of_row]
            if draft and not seq.is_finished:
                num_accepted = next((i for i, token in enumerate(draft) if token != drawn[i]), len(draft))
                if num_accepted and drawn[num_accepted] < 0:
                    num_accepted -= 1  # the token before an error may end the text; where not, the error comes alone
                drawn = drawn[: num_accepted + 1]
                plan.limits[index] = len(drawn)
                plan.num_accepted_tokens += num_accepted
                seq.num_pending += num_accepted
                seq.num_computed_tokens += num_accepted
                seq.num_drafted = 0
                seq.drafter.take_result(len(draft), num_accepted, len(seq.token_ids) + len(drawn))
            tokens.append(drawn)
        return tokens
