"""Admission: which waiting sequences come in."""

from jpaged.config import EngineConfig
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.prefix_cache import NO_HIT
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import Sequence
from jpaged.sequence_queues import SequenceQueues
from jpaged.swap_space import SwappedGroup
from jpaged.swapping import swap_in, swap_in_group


class Admission:
    """In their order, each when there is room for all of it, and for all the others of its group: the first that must
    wait holds up those behind it."""

    def __init__(self, config: EngineConfig, queues: SequenceQueues, kv: KVCacheManager):
        self.queues, self.kv = queues, kv
        self.max_num_seqs = config.max_num_seqs
        self.enable_chunked_prefill = config.enable_chunked_prefill

    def admit_waiting(self, budget: int, plan: SchedulerOutput) -> None:
        """Plans the first tokens of as many as fit into what is left of the step's budget."""
        queues = self.queues
        while queues.waiting and budget and not plan.is_cut:
            if queues.forks.keep_busy_after(plan.num_scheduled_tokens):
                return
            seq = queues.waiting[0]
            if isinstance(seq.swapped, SwappedGroup):
                num_back = self._bring_back(seq, budget, plan)
                if not num_back:
                    return
                budget -= num_back
                continue
            forks = [] if seq.group is None else seq.group.plan_forks(self.kv.block_size)
            num_rows = self.max_num_seqs - len(queues.forks) - len(forks)
            if plan.num_rows >= num_rows or not queues.have_places_for([seq, *(fork.child for fork in forks)]):
                return
            hit = NO_HIT if seq.lacks_prompt_logprobs else self.kv.match_prefix(seq, forks)  # a hit computes no logits
            num_found = self.kv.num_tokens_found(seq, hit)
            num_tokens = min(seq.num_tokens - num_found, budget)
            num_tokens = plan.as_many_as_have_rows(seq, num_found, num_tokens, num_rows)
            if num_found + num_tokens < seq.num_tokens and not self.enable_chunked_prefill:
                return
            reserve = self._num_reserved + sum(self.kv.num_blocks_for_fork(fork) for fork in forks)
            if self.kv.admit(seq, hit, num_tokens, reserve=reserve) is None:
                return
            for _ in range(1 + len(forks)):
                queues.waiting.popleft()
            queues.forks.add(forks)
            if (swapped := swap_in(self.kv, seq, hit)) is not None:
                plan.swapped_in.append(swapped)
            queues.start(seq)
            plan.admitted.append(seq)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_found
                plan.num_new_prompt_tokens += seq.num_prompt_tokens
            plan.num_scheduled_tokens[seq] = num_tokens
            plan.num_prefix_queries += 0 if hit is NO_HIT else seq.num_tokens
            plan.num_prefix_hits += hit.num_tokens
            plan.add_prompt_logprobs(seq, num_tokens)
            budget -= num_tokens

    @property
    def _num_reserved(self) -> int:
        """The blocks that the next tokens of those that run may need, and of forks to come, which share all their
        tokens where anybody comes in: new ones or copies, one of each attention group."""
        return (len(self.queues.running) + len(self.queues.forks)) * self.kv.num_groups

    def _bring_back(self, holder: Sequence, budget: int, plan: SchedulerOutput) -> int:
        """Plans the next token of each sequence of a group that was swapped out; returns their number, 0 where there is
        no room for all."""
        queues = self.queues
        group = [table.seq for table in holder.swapped.unfinished]
        has_rows = plan.num_rows + len(group) <= self.max_num_seqs - len(queues.forks)
        if len(group) > budget or not has_rows or not queues.have_places_for(group):
            return 0
        if (swapped := swap_in_group(self.kv, holder, reserve=self._num_reserved)) is None:
            return 0
        plan.swapped_in.append(swapped)
        for seq in group:
            queues.waiting.remove(seq)
            queues.start(seq)
            plan.admitted.append(seq)
            plan.num_scheduled_tokens[seq] = 1
        return len(group)
