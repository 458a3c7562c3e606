"""Scheduler: decides, every step, how many tokens of which sequences to compute."""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jpaged.config import EngineConfig
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan. The order of num_scheduled_tokens is the order of the batch: single-token rows come first."""

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    num_decodes: int = 0
    admitted: list[Sequence] = field(default_factory=list)  # have a new row and a new block table
    num_preempted: int = 0
    num_new_prompt_tokens: int = 0  # of the requests that this step starts for the first time
    num_prefix_queries: int = 0  # tokens looked up in the prefix cache by the admitted
    num_prefix_hits: int = 0  # and found

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences whose next token this step yields, in batch order."""
        return [s for s, n in self.num_scheduled_tokens.items() if s.num_computed_tokens + n == len(s.token_ids)]


class Scheduler:
    """First come, first served, with iteration-level batching under a token budget.

    Running sequences come before waiting ones, and decodes before prefill chunks, so that one long prompt never stops
    the others' tokens. When blocks run out the newest running sequence is preempted: its blocks are freed and it is
    recomputed later, first in the queue. The oldest one therefore always makes progress.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager):
        self.kv = kv
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.enable_chunked_prefill = config.enable_chunked_prefill
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._free_rows = list(range(self.max_num_seqs))[::-1]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> Iterable[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> SchedulerOutput:
        """The next step. It is empty only when nothing runs or waits."""
        plan = SchedulerOutput()
        budget, block_size = self.max_num_batched_tokens, self.kv.block_size
        for seq in list(self.running):  # decodes, then at most one unfinished prompt: the newest
            num_missing = len(seq.token_ids) - seq.num_computed_tokens
            num_tokens = min(num_missing, budget)
            has_room = num_missing == 1 and seq.num_computed_tokens < len(seq.block_table.blocks) * block_size
            if has_room or self._make_room(seq, num_tokens, plan):
                plan.num_scheduled_tokens[seq] = num_tokens
                plan.num_decodes += num_missing == 1
                budget -= num_tokens
        if not plan.num_preempted:
            self._admit_waiting(budget, plan)
        return plan

    def update(self, plan: SchedulerOutput, token_ids: list[int]) -> list[tuple[Sequence, int]]:
        """Takes the step's result: token_ids are those of plan.sampled, in order. Frees what is finished.

        Returns (sequence, token) for every token appended.
        """
        sampled, block_size = plan.sampled, self.kv.block_size
        for seq, num_tokens in plan.num_scheduled_tokens.items():
            before = seq.num_computed_tokens
            seq.num_computed_tokens = before + num_tokens
            if before // block_size != seq.num_computed_tokens // block_size:
                self.kv.cache_full_blocks(seq, before)
        appended = list(zip(sampled, token_ids, strict=True))
        for seq, token_id in appended:
            reason = seq.append(token_id)
            if reason is not None:
                self.finish(seq, reason)
        return appended

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence, whatever its state, and frees its blocks at once. Ending it twice changes nothing."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def preempt_all(self) -> None:
        """Sends every running sequence back to be recomputed, in order: the pool's content is lost."""
        while self.running:
            self._preempt(self.running[-1])

    def _make_room(self, seq: Sequence, num_tokens: int, plan: SchedulerOutput) -> bool:
        """Gets the blocks for a running sequence's next tokens, from the newest others if need be; False if it had to go
        itself, now or earlier in this step."""
        if seq.status is not SequenceStatus.RUNNING or num_tokens == 0:
            return False
        while self.kv.allocate_slots(seq, num_tokens) is None:
            victim = self.running[-1]
            assert victim not in plan.num_scheduled_tokens, f"{victim} is newer than {seq}, but was scheduled before it"
            self._preempt(victim)
            self._warn_of_preemption(victim)
            plan.num_preempted += 1
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, budget: int, plan: SchedulerOutput) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            matched = self.kv.match_prefix(seq)
            num_matched = len(matched) * self.kv.block_size
            num_tokens = min(seq.num_tokens - num_matched, budget)
            if num_matched + num_tokens < seq.num_tokens and not self.enable_chunked_prefill:
                return
            if self.kv.admit(seq, matched, num_tokens, reserve=len(self.running)) is None:
                return
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.row = self._free_rows.pop()
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_matched
                plan.num_new_prompt_tokens += seq.num_prompt_tokens
            plan.num_scheduled_tokens[seq] = num_tokens
            plan.admitted.append(seq)
            plan.num_prefix_queries += seq.num_tokens
            plan.num_prefix_hits += num_matched
            budget -= num_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        self._free_rows.append(seq.row)
        seq.row = None

    def _warn_of_preemption(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        logger.warning(
            "request %s is preempted and will be recomputed: the KV pool's %d blocks are all in use (%d preemptions so "
            "far). Raise kv_cache_memory_bytes, or lower max_num_seqs or max_num_batched_tokens.",
            seq.request_id,
            self.kv.spec.num_usable_blocks,
            self.num_preemptions,
        )
