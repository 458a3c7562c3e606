"""SchedulerOutput -> the padded numpy arrays of one step. Nothing else pads."""

from dataclasses import dataclass

import numpy as np

from jpaged.buckets import Buckets
from jpaged.config import CacheSpec, EngineConfig
from jpaged.packed_step import PackedStep
from jpaged.sampling_batch import MAX_BANNED_TOKENS, SamplingBatch
from jpaged.scheduler import SchedulerOutput
from jpaged.sequence import Sequence
from models.types import ForwardBatch


@dataclass(frozen=True)
class HostStep:
    """One step's input: the program that it is for, and the buffer that the program takes."""

    bucket: tuple[int, int]
    buffer: np.ndarray
    batch: ForwardBatch  # views into the buffer, as is sampling
    sampling: SamplingBatch
    num_sampled: int

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.sampling.wants_logprobs.any())


class BatchBuilder:
    """Keeps what changes little (prompts, block tables, sampling parameters) in one array row a running sequence.

    A step then gathers rows, and Python's work does not grow with the number of tokens. Where a sequence's next token
    is still being sampled, the device is told to take it from its own table: -1 - row stands for it.
    """

    def __init__(self, config: EngineConfig, spec: CacheSpec):
        num_rows = config.max_num_seqs
        self.block_size = spec.block_size
        self.buckets = Buckets(config.max_num_batched_tokens, config.max_num_seqs, config.token_buckets)
        self.num_rows = num_rows
        self.token_ids = np.zeros((num_rows, spec.max_model_len), np.int32)
        self.block_tables = np.zeros((num_rows, spec.max_blocks_per_seq), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)  # valid columns of block_tables
        self.min_lengths = np.zeros(num_rows, np.int32)  # under it a sequence may not stop
        self.sampling = SamplingBatch.neutral(num_rows)

    def build(self, plan: SchedulerOutput) -> HostStep:
        """The step's input, padded to the smallest program that holds it."""
        for seq in plan.admitted:
            self._load(seq)
        seqs = list(plan.num_scheduled_tokens)
        rows = np.fromiter((s.row for s in seqs), np.int32, len(seqs))
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int32, len(seqs))
        starts = np.array(plan.starts, np.int32)
        known = np.fromiter((len(s.token_ids) for s in seqs), np.int32, len(seqs))
        self.token_ids[rows, known - 1] = np.fromiter((s.token_ids[-1] for s in seqs), np.int32, len(seqs))
        self.token_ids[rows, known] = -1 - rows
        self._extend_block_tables(seqs, rows)

        ends = starts + counts
        is_sampled = ends >= known
        num_sampled = len(plan.sampled)
        bucket = self.buckets.choose(int(counts.sum()), num_sampled)
        buffer, batch, sampling = PackedStep(*bucket, self.num_rows, self.block_tables.shape[1]).empty()
        self._fill_forward_batch(batch, plan.num_decodes, rows, counts, starts, is_sampled)
        self._fill_sampling_batch(sampling, plan.sampled, rows[is_sampled], ends[is_sampled])
        return HostStep(bucket, buffer, batch, sampling, num_sampled)

    def _load(self, seq: Sequence) -> None:
        row, params = seq.row, seq.params
        self.token_ids[row, : seq.num_tokens] = seq.token_ids
        self.num_blocks[row] = 0
        self.min_lengths[row] = seq.num_prompt_tokens + params.min_tokens
        self.sampling.set_row(row, params, seq.seed)

    def _extend_block_tables(self, seqs: list[Sequence], rows: np.ndarray) -> None:
        have = np.fromiter((len(s.block_table.blocks) for s in seqs), np.int32, len(seqs))
        for i in np.flatnonzero(have != self.num_blocks[rows]):
            row, known = rows[i], self.num_blocks[rows[i]]
            self.block_tables[row, known : have[i]] = seqs[i].block_table.block_ids(known)
            self.num_blocks[row] = have[i]

    def _fill_forward_batch(self, batch: ForwardBatch, num_decodes: int, rows, counts, starts, is_sampled) -> None:
        num_seqs, num_tokens = len(rows), int(counts.sum())
        ends = np.cumsum(counts, dtype=np.int32)
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(ends - counts - starts, counts)
        block_ids = self.block_tables[token_rows, positions // self.block_size]

        batch.token_ids[:num_tokens] = self.token_ids[token_rows, positions]
        batch.positions[:num_tokens] = positions
        batch.logits_indices[: int(is_sampled.sum())] = (ends - 1)[is_sampled]
        meta = batch.attention
        meta.slot_mapping[:num_tokens] = block_ids * self.block_size + positions % self.block_size
        meta.query_start_loc[1 : num_seqs + 1] = ends
        meta.query_start_loc[num_seqs + 1 :] = num_tokens
        meta.seq_lens[:num_seqs] = starts + counts
        width = self.num_blocks[rows].max(initial=0)
        meta.block_tables[:num_seqs, :width] = self.block_tables[rows, :width]
        meta.distribution[:] = num_decodes, num_decodes, num_seqs

    def _fill_sampling_batch(self, batch: SamplingBatch, sampled: list[Sequence], rows, lengths) -> None:
        batch.copy_rows(self.sampling, rows)
        batch.positions[: len(rows)] = lengths
        for i in np.flatnonzero(lengths < self.min_lengths[rows]):
            banned = sorted(sampled[i].stop_token_ids)
            assert len(banned) <= MAX_BANNED_TOKENS, f"{sampled[i]} bans {len(banned)} tokens"
            batch.banned_ids[i, : len(banned)] = banned
