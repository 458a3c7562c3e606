"""SchedulerOutput -> the padded numpy arrays of one step. Nothing else pads."""

from dataclasses import dataclass

import numpy as np

from jpaged.buckets import Buckets
from jpaged.cache_spec import CacheSpec
from jpaged.config import EngineConfig
from jpaged.device_state import RowLoad
from jpaged.logits_edits import EditLoad
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import Sequence
from jpaged.step_input import StepInput
from jpaged.swap_space import SwappedOut


@dataclass(frozen=True)
class HostStep:
    """One step's program and input, packed. row_loads and edit_loads bring the state of new sequences, before the step
    runs; so come and go the blocks of those that are swapped."""

    bucket: tuple[int, int]
    buffer: np.ndarray
    row_loads: list[np.ndarray]
    edit_loads: list[np.ndarray]
    kept_slots: list[int]  # of the sampled sequences that have logits processors
    num_sampled: int
    wants_logprobs: bool
    swapped_out: list[SwappedOut]
    swapped_in: list[SwappedOut]


class BatchBuilder:
    """Knows what the device knows of each running sequence's row, and so tells it only what is new.

    Where a sequence's next token is still being sampled, the device is told to take it from its own table.
    """

    def __init__(self, config: EngineConfig, spec: CacheSpec, vocab_size: int):
        self.vocab_size = vocab_size
        self.max_num_seqs = num_rows = config.max_num_seqs
        self.table_width, self.num_groups = spec.table_width, len(spec.windows)
        self.buckets = Buckets(
            config.max_num_batched_tokens, config.max_num_seqs, config.token_buckets, config.max_num_rows
        )
        self.token_ids = np.zeros((num_rows, spec.max_model_len), np.int32)
        self.num_entries = np.zeros(num_rows, np.int32)  # of each row's block table, as the device has it
        self.wants_logprobs = np.zeros(num_rows, bool)

    def build(self, plan: SchedulerOutput) -> HostStep:
        """The step's input, padded to the smallest program that holds it."""
        seqs = list(plan.num_scheduled_tokens)
        rows = np.fromiter((s.row for s in seqs), np.int32, len(seqs))
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int32, len(seqs))
        starts = np.array(plan.starts, np.int32)
        known = np.fromiter((len(s.token_ids) for s in seqs), np.int32, len(seqs))
        for seq in plan.admitted:
            self.token_ids[seq.row, : seq.num_tokens] = seq.token_ids
            self.num_entries[seq.row] = len(seq.block_table)
            self.wants_logprobs[seq.row] = seq.params.needs_logprobs
        self.token_ids[rows, known - 1] = np.fromiter((s.token_ids[-1] for s in seqs), np.int32, len(seqs))
        is_pending = starts >= known
        self.token_ids[rows[is_pending], starts[is_pending]] = -1 - rows[is_pending]
        is_sampled = starts + counts >= known
        for i, draft in enumerate(plan.drafts.values(), start=plan.num_decodes):
            self.token_ids[rows[i], starts[i] + 1 : starts[i] + counts[i]] = draft
        num_tokens, num_sampled = int(counts.sum()), plan.num_sampled_rows
        num_rows = num_sampled + plan.num_prompt_logprobs

        bucket = self.buckets.choose(num_tokens, num_rows, decodes_on=max(plan.limits, default=1) > 1)
        buffer, step = StepInput.packing(*bucket, self.max_num_seqs, self.num_groups).empty()
        step.make_neutral(self.max_num_seqs, self.table_width)
        ends = np.cumsum(counts, dtype=np.int32)
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(ends - counts - starts, counts)
        step.token_ids[:num_tokens] = self.token_ids[token_rows, positions]
        step.row_ids[: len(seqs)] = rows
        step.starts[: len(seqs)] = starts
        step.query_start_loc[1 : len(seqs) + 1] = ends
        step.query_start_loc[len(seqs) + 1 :] = num_tokens
        step.distribution[:] = plan.num_decodes, plan.num_decodes + len(plan.drafts), len(seqs)
        sampled_rows, logits_indices = rows[is_sampled], (ends - 1)[is_sampled]
        if plan.forks:
            last = dict(zip(plan.sampled, logits_indices.tolist()))
        if plan.drafts:  # a row for each of their tokens
            number = np.arange(len(seqs)) - plan.num_decodes
            each = np.where((number >= 0) & (number < len(plan.drafts)), counts, 1)[is_sampled]
            logits_indices = np.repeat(logits_indices + 1 - np.cumsum(each), each) + np.arange(each.sum())
            sampled_rows = np.repeat(sampled_rows, each)
        if plan.forks:
            logits_indices = np.append(logits_indices, [last[fork.parent] for fork in plan.forks])
            sampled_rows = np.append(sampled_rows, [fork.child.row for fork in plan.forks])
        step.logits_indices[:num_sampled] = logits_indices
        step.sampled_rows[:num_sampled] = sampled_rows
        step.limits[: len(plan.limits)] = plan.limits  # several only where there are no drafts
        for i, copy in enumerate(plan.copies):
            step.block_copies[i] = copy.source.block_id, copy.destination.block_id
        row = num_sampled
        for seq, first, end in plan.prompt_logprobs:
            index, after = seqs.index(seq), row + end - first
            step.logits_indices[row:after] = np.arange(first, end) - starts[index] + ends[index] - counts[index]
            step.targets[row:after] = seq.token_ids[first + 1 : end + 1]
            row = after
        row_loads = self._load_rows(plan.admitted + self._update_tables(plan, seqs, rows, counts, step.table_updates))
        kept_slots = [seq.edit_slot for seq in plan.sampled if seq.edit_slot and seq.params.logits_processors]
        edit_loads = [self._load_edits(seq) for seq in plan.admitted if seq.edit_slot]
        wants_logprobs = bool(plan.prompt_logprobs) or bool(self.wants_logprobs[sampled_rows].any())
        return HostStep(
            bucket, buffer, row_loads, edit_loads, kept_slots, num_sampled, wants_logprobs, plan.swapped_out,
            plan.swapped_in,
        )  # fmt: skip

    def _update_tables(self, plan: SchedulerOutput, seqs: list[Sequence], rows, counts, updates) -> list[Sequence]:
        """Writes down the blocks that the device has not seen; returns the sequences that have too many for that."""
        have = np.fromiter((len(s.block_table.blocks) for s in seqs), np.int32, len(seqs))
        num_updates, reload = len(plan.copies), []
        for i, copy in enumerate(plan.copies):
            updates[i] = copy.seq.row, copy.index, copy.destination.block_id
        has_copied = {copy.seq for copy in plan.copies}
        for i in np.flatnonzero(have != self.num_entries[rows]):
            seq, known = seqs[i], self.num_entries[rows[i]]
            if have[i] - known > (counts[i] - (seq in has_copied)) * self.num_groups:  # there is room for one a token
                reload.append(seq)
                continue
            for entry, block_id in enumerate(seq.block_table.block_ids(known), start=known):
                updates[num_updates] = rows[i], entry, block_id
                num_updates += 1
        self.num_entries[rows] = have
        return reload

    def _load_rows(self, seqs: list[Sequence]) -> list[np.ndarray]:
        """Whole rows for the device, `RowLoad.SIZE` to a buffer."""
        packing, buffers = RowLoad.packing(self.table_width), []
        for begin in range(0, len(seqs), RowLoad.SIZE):
            buffer, load = packing.empty()
            buffers.append(buffer)
            load.row_ids.fill(self.max_num_seqs)
            load.sampling.make_neutral()
            for i, seq in enumerate(seqs[begin : begin + RowLoad.SIZE]):
                load.row_ids[i] = seq.row
                load.block_tables[i, : len(seq.block_table)] = seq.block_table.block_ids()
                min_length = seq.num_prompt_tokens + seq.params.min_tokens
                load.sampling.set_row(
                    i, seq.params, seq.seed, seq.stop_token_ids, min_length,
                    sample_index=seq.index, edit_slot=seq.edit_slot,
                )  # fmt: skip
        return buffers

    def _load_edits(self, seq: Sequence) -> np.ndarray:
        """The edits of a sequence's logits, with all its tokens counted."""
        buffer, load = EditLoad.packing(self.vocab_size).empty()
        load.slot[:] = seq.edit_slot
        load.edits.make_neutral()
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        load.edits.set_slot(0, seq.params, prompt, seq.output_token_ids, seq.bad_words)
        return buffer
