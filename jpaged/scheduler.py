"""Scheduler: decides, every step, how many tokens of which sequences to compute."""

from collections import deque
from collections.abc import Iterable

from jpaged.config import EngineConfig
from jpaged.errors import NOT_FINITE, TOKEN_ERRORS
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.preemption import Preemption, warn_of_preemption
from jpaged.rows import Rows
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence, SequenceStatus, insert_in_order


class Scheduler:
    """First come, first served within a priority, with iteration-level batching under a token budget.

    Running sequences come before waiting ones, and decodes before prefill chunks, so that one long prompt never stops
    the others' tokens. When blocks run out the newest running sequence of the lowest priority is preempted: its blocks
    are freed, and it is recomputed or its KV comes back from host memory, in the place in the queue that it had: nobody
    who came later is admitted before. The oldest one of the highest priority therefore always makes progress.

    `schedule` may be called again before the step that it planned has run: what a step will have computed and sampled
    counts as done from then on, and `update` takes the results in the order of the plans. A sequence that turns out to
    have stopped leaves a row behind in the steps in flight; its result is dropped, and its write goes to a block that
    its next owner overwrites later.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager, preemption: Preemption = Preemption()):
        self.kv = kv
        self.preemption = preemption
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.num_scheduler_steps = config.num_scheduler_steps
        self.enable_chunked_prefill = config.enable_chunked_prefill
        self.waiting: deque[Sequence] = deque()  # by their order, as running is
        self.running: list[Sequence] = []
        self._num_arrived = self.num_preemptions = 0
        self.in_flight: deque[SchedulerOutput] = deque()  # planned, result not yet seen
        self._rows = Rows(config.max_num_seqs, config.max_num_edited_seqs)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> Iterable[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, seq: Sequence) -> None:
        seq.order = seq.params.priority, self._num_arrived
        self._num_arrived += 1
        insert_in_order(self.waiting, seq)

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None where it would have to preempt before the steps in flight have shown who stops in them.

        Empty when there is nothing to compute: nothing runs or waits, or all that runs is in flight with its last token.
        """
        plan = SchedulerOutput()
        budget, block_size = self.max_num_batched_tokens, self.kv.block_size
        running, chunks = list(self.running), {}
        for i, seq in enumerate(running):  # of the budget there is always a token left for each that comes later
            if seq.num_pending and (seq.sits_out or seq.num_tokens_left == 0):  # or its last token is on its way
                continue
            num_missing = len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens
            num_tokens = 1 if num_missing == 1 else min(num_missing, budget - (len(running) - i - 1))
            if num_missing > 1 and seq.lacks_prompt_logprobs:
                num_rows = self.max_num_seqs - len(chunks) - (len(running) - i - 1)
                num_tokens = plan.as_many_as_have_rows(seq, seq.num_computed_tokens, num_tokens, num_rows)
            has_room = num_missing == 1 and seq.num_computed_tokens < len(seq.block_table.blocks) * block_size
            if not has_room and (has_room := self._make_room(seq, num_tokens, plan)) is None:
                return None
            if has_room:
                if num_missing == 1:
                    plan.num_scheduled_tokens[seq] = 1
                    plan.num_decodes += 1
                else:
                    chunks[seq] = num_tokens
                    plan.add_prompt_logprobs(seq, num_tokens)
                budget -= num_tokens
        plan.num_scheduled_tokens.update(chunks)
        if not plan.num_preempted:
            self._admit_waiting(budget, plan)
        if plan.num_scheduled_tokens:
            self._commit(plan)
        return plan

    def _commit(self, plan: SchedulerOutput) -> None:
        """Counts what is scheduled as computed, and what it samples as pending."""
        starts, sampled, limits = plan.starts, plan.sampled, plan.limits
        num_steps = self._num_decodes_in_a_row(plan)
        for seq, num_tokens in plan.num_scheduled_tokens.items():
            start = seq.num_computed_tokens
            starts.append(start)
            end = start + num_tokens
            if end == len(seq.token_ids) + seq.num_pending:
                limit = 1 if num_steps == 1 else min(num_steps, seq.num_tokens_left)
                seq.num_pending += limit
                end += limit - 1
                sampled.append(seq)
                limits.append(limit)
            seq.num_computed_tokens = end
        for seq, _, end in plan.prompt_logprobs:
            seq.num_prompt_logprobs = end
        self.in_flight.append(plan)

    def _num_decodes_in_a_row(self, plan: SchedulerOutput) -> int:
        """How often the device may decode before the host is asked: more than once only where everyone decodes, nobody
        waits to come in, every sequence is judged by its tokens alone, and there are blocks for all of it."""
        if self.num_scheduler_steps == 1 or self.waiting or plan.num_decodes < len(plan.num_scheduled_tokens):
            return 1
        most = min(self.num_scheduler_steps, max(seq.num_tokens_left for seq in plan.num_scheduled_tokens))
        for seq in plan.num_scheduled_tokens:
            if seq.params.stop or seq.params.logprobs is not None or seq.sits_out:
                return 1
            if self.kv.allocate_slots(seq, min(most, seq.num_tokens_left)) is None:
                return 1
        return most

    def update(self, plan: SchedulerOutput, token_ids: list[list[int]]) -> list[tuple[int, Sequence, list[int]]]:
        """Takes the result of the oldest step in flight: token_ids are those of each of plan.sampled, in order, at least
        as many as its limit. Frees what is finished.

        Returns (index in plan.sampled, sequence, tokens appended) for each sequence that had not ended before; tokens
        after an end are dropped. One of TOKEN_ERRORS in place of a token ends its sequence, and says so in its error.
        """
        assert self.in_flight and self.in_flight[0] is plan, "results must come in the order of the plans"
        self.in_flight.popleft()
        if plan.num_decodes < len(plan.num_scheduled_tokens):
            self._cache_prompts(plan)
        appended = []
        for index, (seq, tokens, limit) in enumerate(zip(plan.sampled, token_ids, plan.limits, strict=True)):
            if seq.is_finished:
                continue
            before = len(seq.token_ids)
            seq.num_pending -= limit
            reason = None
            for token_id in tokens[:limit]:
                if token_id < 0:
                    seq.error, reason = seq.error or TOKEN_ERRORS[token_id], FinishReason.ERROR
                    break
                reason = seq.append(token_id)
                if reason is not None:
                    break
            appended.append((index, seq, seq.token_ids[before:]))
            if (before - 1) // self.kv.block_size != (len(seq.token_ids) - 1) // self.kv.block_size:
                self.kv.cache_full_blocks(seq, before - 1, len(seq.token_ids) - 1)
            if reason is not None:
                if token_id == NOT_FINITE:
                    self.kv.distrust(seq)
                self.finish(seq, reason)
        return appended

    def _cache_prompts(self, plan: SchedulerOutput) -> None:
        """Makes what a step has computed of prompts findable; a last token's turn comes with the one sampled after it."""
        sampled = set(plan.sampled)
        for (seq, num_tokens), start in zip(plan.num_scheduled_tokens.items(), plan.starts):
            if not seq.is_finished:
                self.kv.cache_full_blocks(seq, start, start + num_tokens - (seq in sampled))

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence, whatever its state, and frees its blocks at once. Ending it twice changes nothing."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
            self.kv.discard_swapped(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def preempt_all(self) -> None:
        """Sends every running sequence back to be recomputed, in order, and drops the steps in flight: the pool's
        content is lost, and a copy in host memory may have been on its way."""
        for plan in reversed(self.in_flight):
            plan.take_back_prompt_logprobs()
        self.in_flight.clear()
        for seq in self.waiting:
            self.kv.discard_swapped(seq)
        while self.running:
            self._preempt(self.running[-1])

    def _make_room(self, seq: Sequence, num_tokens: int, plan: SchedulerOutput) -> bool | None:
        """Gets the blocks for a running sequence's next tokens, from the newest others if need be; False if it had to go
        itself, now or earlier in this step; None where somebody would have to go while a step is in flight."""
        if seq.status is not SequenceStatus.RUNNING or num_tokens == 0:
            return False
        while self.kv.allocate_slots(seq, num_tokens) is None:
            if self.in_flight:
                return None
            victim = self.running[-1]
            assert victim not in plan.num_scheduled_tokens, f"{victim} is newer than {seq}, but was scheduled before it"
            self._give_way(victim, plan)
            if victim is seq:
                return False
        return True

    def _give_way(self, victim: Sequence, plan: SchedulerOutput) -> None:
        """Preempts, in the cheaper way back, and says so."""
        size = self.kv.num_blocks_for(victim.num_computed_tokens), victim.num_computed_tokens
        is_swapped = self.preemption.prefers_swap(*size) and self.kv.swap_out(victim)
        if is_swapped:
            plan.swapped_out.append(victim.swapped)
        self._preempt(victim)
        plan.num_preempted += 1
        self.num_preemptions += 1
        way = self.preemption.explain(is_swapped, *size)
        warn_of_preemption(victim, way, self.kv.spec, self.num_preemptions)

    def _admit_waiting(self, budget: int, plan: SchedulerOutput) -> None:
        while self.waiting and budget and plan.num_rows < self.max_num_seqs and not plan.is_cut:
            seq = self.waiting[0]
            if not self._rows.has_place_for(seq):
                return
            matched = [] if seq.lacks_prompt_logprobs else self.kv.match_prefix(seq)  # a hit computes no logits
            num_found = self.kv.num_tokens_found(seq, matched)
            num_tokens = min(seq.num_tokens - num_found, budget)
            num_tokens = plan.as_many_as_have_rows(seq, num_found, num_tokens, self.max_num_seqs)
            if num_found + num_tokens < seq.num_tokens and not self.enable_chunked_prefill:
                return
            if self.kv.admit(seq, matched, num_tokens, reserve=len(self.running)) is None:
                return
            insert_in_order(self.running, self.waiting.popleft())
            if (swapped := self.kv.swap_in(seq, len(matched))) is not None:
                plan.swapped_in.append(swapped)
            seq.status = SequenceStatus.RUNNING
            self._rows.take(seq)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_found
                plan.num_new_prompt_tokens += seq.num_prompt_tokens
            plan.num_scheduled_tokens[seq] = num_tokens
            plan.admitted.append(seq)
            plan.num_prefix_queries += seq.num_tokens
            plan.num_prefix_hits += len(matched) * self.kv.block_size
            plan.add_prompt_logprobs(seq, num_tokens)
            budget -= num_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        insert_in_order(self.waiting, seq)

    def _release(self, seq: Sequence) -> None:
        self.kv.free(seq)
        self._rows.give_back(seq)
        seq.num_pending = 0
