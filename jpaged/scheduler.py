"""Scheduler: decides, every step, how many tokens of which sequences to compute."""

from collections import deque

from jpaged.admission import Admission
from jpaged.beam_rows import BeamRows
from jpaged.config import EngineConfig
from jpaged.decode_run import num_decodes_in_a_row
from jpaged.errors import NOT_FINITE, TOKEN_ERRORS
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.preemption import Preemption, warn_of_preemption
from jpaged.rows import Rows
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import FinishReason, Sequence, SequenceStatus
from jpaged.sequence_queues import SequenceQueues
from jpaged.speculation import Speculation
from jpaged.swapping import discard_swapped, swap_out, swap_out_group


class Scheduler:
    """First come, first served within a priority, with iteration-level batching under a token budget.

    Running sequences come before waiting ones, and decodes before prefill chunks, so that one long prompt never stops
    the others' tokens. When blocks run out the newest running sequence of the lowest priority is preempted: its blocks
    are freed, and it is recomputed or its KV comes back from host memory, in the place in the queue that it had: nobody
    who came later is admitted before. The oldest one of the highest priority therefore always makes progress. The
    sequences of a group come and go together: the first is admitted when there is room for all, and the others fork
    from it when it has computed what they share (`SequenceGroup.plan_forks`).

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
        self.queues = SequenceQueues(Rows(config.max_num_seqs, config.max_num_edited_seqs), kv)
        self.waiting, self.running, self.forks = self.queues.waiting, self.queues.running, self.queues.forks
        self.admission = Admission(config, self.queues, kv)
        self.num_preemptions = 0
        self.in_flight: deque[SchedulerOutput] = deque()  # planned, result not yet seen
        self.beam_rows = BeamRows(kv)
        self.speculation = Speculation(config, kv)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        return self.queues.sequences

    def add(self, seq: Sequence) -> None:
        self.queues.add(seq)

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None where it would have to preempt before the steps in flight have shown who stops in them.

        Empty when there is nothing to compute: nothing runs or waits, or all that runs is in flight with its last token.
        """
        plan = SchedulerOutput()
        num_verified = max((len(earlier.drafts) for earlier in self.in_flight), default=0)
        if self.speculation.must_wait(num_verified, len(self.running)):
            return plan
        may_draft = not num_verified and not self.forks  # drafts keep step with one another
        budget, slots_per_entry = self.max_num_batched_tokens, self.kv.block_size / self.kv.num_groups
        running, chunks = list(self.running), {}
        for i, seq in enumerate(running):  # of the budget there is always a token left for each that comes later
            if seq.num_pending and (seq.sits_out or seq.num_drafted or seq.num_tokens_left == 0):
                continue  # the host must see what is pending, or it is the last
            num_missing = len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens
            num_tokens = 1 if num_missing == 1 else min(num_missing, budget - (len(running) - i - 1))
            if num_missing == 1 and seq.drafter is not None and may_draft:
                if draft := self.speculation.draft(seq, budget - (len(running) - i), len(running), plan):
                    budget -= 1 + len(draft)
                    continue
            if num_missing > 1 and seq.lacks_prompt_logprobs:
                num_others = len(self.forks) + len(chunks) + len(plan.drafts) + len(running) - i - 1
                num_rows = self.max_num_seqs - num_others
                num_tokens = plan.as_many_as_have_rows(seq, seq.num_computed_tokens, num_tokens, num_rows)
            blocks = seq.block_table.blocks
            has_room = (
                num_missing == 1
                and seq.num_computed_tokens < len(blocks) * slots_per_entry
                and blocks[-1].ref_count == 1  # where it is not, it may be that which the token is written to
            )
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
        if plan.drafts:
            plan.add_drafts()
        plan.num_scheduled_tokens.update({seq: n for seq, n in chunks.items() if seq.status is SequenceStatus.RUNNING})
        if not plan.num_preempted:
            self.admission.admit_waiting(budget, plan)
        if plan.num_scheduled_tokens:
            self._commit(plan)
        return plan

    def _commit(self, plan: SchedulerOutput) -> None:
        """Counts what is scheduled as computed, and what it samples as pending."""
        starts, sampled, limits, drafts = plan.starts, plan.sampled, plan.limits, plan.drafts
        num_steps = 1
        if self.num_scheduler_steps > 1 and not self.waiting and not self.forks:  # nobody waits to come in
            num_steps = num_decodes_in_a_row(plan, self.kv, self.num_scheduler_steps)
        for seq, num_tokens in plan.num_scheduled_tokens.items():
            start = seq.num_computed_tokens
            starts.append(start)
            if drafts and seq in drafts:
                seq.num_drafted = num_tokens - 1
                num_tokens = 1  # the rest counts when it is accepted
            end = start + num_tokens
            if end == len(seq.token_ids) + seq.num_pending:
                limit = 1 if num_steps == 1 else min(num_steps, seq.num_tokens_left)
                seq.num_pending += limit
                end += limit - 1
                sampled.append(seq)
                limits.append(limit)
            seq.num_computed_tokens = end
        for fork in self.forks.take_ready():
            parent, child, num_tokens = fork
            self.kv.fork(parent, child, num_tokens)
            self.queues.start(child)
            plan.admitted.append(child)
            child.num_cached_tokens = parent.num_cached_tokens
            if fork.is_whole:
                child.num_pending = 1
                plan.sample_fork(fork)
        plan.admitted += self.beam_rows.take_moved(plan.num_scheduled_tokens)
        if self.kv.copies:
            plan.copies = self.kv.take_copies()
        for seq, _, end in plan.prompt_logprobs:
            seq.num_prompt_logprobs = end
        self.in_flight.append(plan)

    def update(self, plan: SchedulerOutput, token_ids: list[list[int]]) -> list[tuple[int, Sequence, list[int]]]:
        """Takes the result of the oldest step in flight: token_ids are those of each of its sampling rows, in order: at
        least as many as the sequence's limit. Frees what is finished.

        Returns (its first row, sequence, tokens appended) for each sequence that had not ended before; tokens after an
        end are dropped. One of TOKEN_ERRORS in place of a token ends its sequence, and says so in its error. Beams get no
        tokens: `beam_rows.move` follows.
        """
        assert self.in_flight and self.in_flight[0] is plan, "results must come in the order of the plans"
        self.in_flight.popleft()
        if plan.num_decodes < len(plan.num_scheduled_tokens):
            self._cache_prompts(plan)
        rows = range(len(token_ids))
        if plan.drafts:
            rows, token_ids = plan.first_rows, self.speculation.verify(plan, token_ids)
        appended = []
        for row, seq, tokens, limit in zip(rows, plan.sampled, token_ids, plan.limits, strict=True):
            if seq.is_finished:
                continue
            before = len(seq.token_ids)
            seq.num_pending -= limit
            if seq.is_beam and tokens[0] >= 0:  # what it goes on with is decided when all of its group are known
                appended.append((row, seq, []))
                continue
            reason = None
            for token_id in tokens[:limit]:
                if token_id < 0:
                    seq.error, reason = seq.error or TOKEN_ERRORS[token_id], FinishReason.ERROR
                    break
                reason = seq.append(token_id)
                if reason is not None:
                    break
            appended.append((row, seq, seq.token_ids[before:]))
            if (before - 1) // self.kv.block_size != (len(seq.token_ids) - 1) // self.kv.block_size:
                self.kv.mark_computed(seq, before - 1, len(seq.token_ids) - 1)
            if reason is not None:
                if token_id == NOT_FINITE:
                    self.kv.distrust(seq)
                self.finish(seq, reason)
        return appended

    def _cache_prompts(self, plan: SchedulerOutput) -> None:
        """Makes what a step has computed of prompts findable; a last token's turn comes with the one sampled after it."""
        sampled = set(plan.sampled)
        for (seq, num_tokens), start in zip(plan.num_scheduled_tokens.items(), plan.starts):
            if not seq.is_finished and seq not in plan.drafts:
                self.kv.mark_computed(seq, start, start + num_tokens - (seq in sampled))

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence, whatever its state, and frees its blocks at once. Ending it twice changes nothing."""
        self.queues.finish(seq, reason)

    def preempt_all(self) -> None:
        """Sends all back to be recomputed, in order, and drops the steps in flight: the pool's content is lost, and a copy
        in host memory may have been on its way."""
        for plan in reversed(self.in_flight):
            plan.take_back_prompt_logprobs()
        self.in_flight.clear()
        for seq in self.waiting:
            discard_swapped(self.kv, seq)
        while self.running:
            self.queues.preempt(self.running[-1])

    def _make_room(self, seq: Sequence, num_tokens: int, plan: SchedulerOutput) -> bool | None:
        """Gets the blocks for a running sequence's next tokens, from the newest others if need be; False if it had to go
        itself, now or earlier in this step; None where somebody would have to go while a step is in flight."""
        if seq.status is not SequenceStatus.RUNNING or num_tokens == 0:
            return False
        while self.kv.allocate_slots(seq, num_tokens) is None:
            if self.in_flight:
                return None
            gone = self._give_way(self.running[-1], plan)
            if seq in gone:
                return False
        return True

    def _give_way(self, victim: Sequence, plan: SchedulerOutput) -> list[Sequence]:
        """Preempts, in the cheaper way back, and says so; returns all that went. A group that has forks to come, or tokens
        of a prompt to compute, is always recomputed."""
        kv, group, swapped = self.kv, victim.group, None
        if group is None:
            size, can_swap = (kv.spec.num_blocks_for(victim.num_computed_tokens), victim.num_computed_tokens), True
        else:
            members = group.unfinished
            num_blocks = len({block for seq in members for block in seq.block_table.blocks})
            size = num_blocks, group.num_tokens_to_recompute(kv.block_size)
            can_swap = all(seq.num_computed_tokens == seq.num_tokens - 1 for seq in members)
        if can_swap and self.preemption.prefers_swap(*size):
            swapped = swap_out(kv, victim) if group is None else swap_out_group(kv, members)
        if swapped is not None:
            plan.swapped_out.append(swapped)
        gone = self.queues.preempt(victim)
        for seq in gone:
            plan.drop(seq)
        plan.num_preempted += 1
        self.num_preemptions += 1
        way = self.preemption.explain(swapped is not None, *size) if can_swap else "will be recomputed"
        warn_of_preemption(victim, way, kv.spec, self.num_preemptions)
        return gone
