"""SchedulerOutput: one step's plan."""

from dataclasses import dataclass, field
from itertools import accumulate

from jpaged.kv_cache_manager import BlockCopy
from jpaged.sequence import Sequence, SequenceStatus
from jpaged.sequence_group import Fork
from jpaged.swap_space import SwappedOut


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan. The order of num_scheduled_tokens is the order of the batch: single-token rows, drafts, chunks."""

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # the first position computed of each, in the same order
    sampled: list[Sequence] = field(default_factory=list)  # those whose next token this step yields, in batch order
    forks: list[Fork] = field(default_factory=list)  # their children, the last of sampled, sample from parents' rows
    copies: list[BlockCopy] = field(default_factory=list)  # to be made before the step writes
    limits: list[int] = field(default_factory=list)  # how many tokens it yields of each: several where it decodes on
    prompt_logprobs: list[tuple[Sequence, int, int]] = field(default_factory=list)  # [first, end) of computed positions
    num_extra_rows: int = 0  # of logits, for them, beyond one a sequence
    is_cut: bool = False  # a prompt goes on in the next step for want of such rows: nobody new comes in before it ends
    num_decodes: int = 0
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)  # what is verified after the next token of each
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of these, as far as the results are seen
    admitted: list[Sequence] = field(default_factory=list)  # have a new row and a new block table
    num_preempted: int = 0
    swapped_out: list[SwappedOut] = field(default_factory=list)  # to be copied before the step runs, first these,
    swapped_in: list[SwappedOut] = field(default_factory=list)  # and then these
    num_new_prompt_tokens: int = 0  # of the requests that this step starts for the first time
    num_prefix_queries: int = 0  # tokens looked up in the prefix cache by the admitted
    num_prefix_hits: int = 0  # and found

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def num_sampled_rows(self) -> int:
        """Rows of logits that yield the tokens of `sampled`."""
        return len(self.sampled) + self.num_draft_tokens

    @property
    def first_rows(self) -> list[int]:
        """The first row of each of `sampled`; one with a draft has a row for each token of it, too."""
        rows = [1 + len(self.drafts.get(seq, ())) for seq in self.sampled]
        return [end - num_rows for end, num_rows in zip(accumulate(rows), rows)]

    def sample_fork(self, fork: Fork) -> None:
        """The child's next token comes from the parent's hidden state, like the parent's own."""
        self.sampled.append(fork.child)
        self.limits.append(1)
        self.forks.append(fork)

    def add_drafts(self) -> None:
        """Schedules the drafts of those that nobody has preempted since they were made."""
        self.drafts = {seq: draft for seq, draft in self.drafts.items() if seq.status is SequenceStatus.RUNNING}
        self.num_scheduled_tokens.update({seq: 1 + len(draft) for seq, draft in self.drafts.items()})
        self.num_draft_tokens = sum(map(len, self.drafts.values()))

    def drop(self, seq: Sequence) -> None:
        """Takes a sequence out of a plan that is still being made."""
        if seq in self.num_scheduled_tokens:
            self.num_decodes -= list(self.num_scheduled_tokens).index(seq) < self.num_decodes
            del self.num_scheduled_tokens[seq]
        self.prompt_logprobs = [rows for rows in self.prompt_logprobs if rows[0] is not seq]

    @property
    def num_prompt_logprobs(self) -> int:
        return sum(end - first for _, first, end in self.prompt_logprobs)

    @property
    def num_rows(self) -> int:
        """The rows of logits that the step needs where every sequence in it samples, as far as it is planned."""
        return len(self.num_scheduled_tokens) + self.num_extra_rows

    def as_many_as_have_rows(self, seq: Sequence, start: int, num_tokens: int, num_rows: int) -> int:
        """How many of seq's num_tokens tokens from start on can be computed in a step of num_rows rows of logits, where
        each that lacks its log-probs needs one."""
        if not seq.lacks_prompt_logprobs:
            return num_tokens
        num_without = max(seq.num_prompt_logprobs - start, 0)  # had before it was preempted
        num_fitting = min(num_tokens, num_without + num_rows - self.num_rows)
        self.is_cut |= num_fitting < num_tokens
        return num_fitting

    def add_prompt_logprobs(self, seq: Sequence, num_tokens: int) -> None:
        """Plans those of seq's next num_tokens tokens that it lacks."""
        if not seq.lacks_prompt_logprobs:
            return
        start = seq.num_computed_tokens
        first, end = max(start, seq.num_prompt_logprobs), min(start + num_tokens, seq.num_prompt_tokens - 1)
        if end > first:
            self.prompt_logprobs.append((seq, first, end))
            self.num_extra_rows += end - first - (start + num_tokens < seq.num_tokens)  # the last token's row samples

    def take_back_prompt_logprobs(self) -> None:
        """Of a step whose result is lost; the latest first."""
        for seq, first, _ in self.prompt_logprobs:
            seq.num_prompt_logprobs = first
