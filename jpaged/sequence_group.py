"""SequenceGroup: the sequences of one request, which are scheduled, preempted and resumed together."""

from typing import NamedTuple

from jpaged.sequence import Sequence


class Fork(NamedTuple):
    """child starts from the KV of its first num_tokens tokens, as soon as parent has computed them."""

    parent: Sequence
    child: Sequence
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to compute: the child's next token is sampled from the parent's hidden state."""
        return self.num_tokens == self.child.num_tokens


class SequenceGroup:
    """Several samples of one request, in order of their index."""

    __slots__ = ("sequences", "_planned")

    def __init__(self, first: Sequence, num_sequences: int):
        self.sequences = [first, *(first.fork(index) for index in range(1, num_sequences))]
        self._planned: tuple[list[int], list[Fork]] = [], []  # for lengths
        for seq in self.sequences:
            seq.group = self

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.sequences if not seq.is_finished]

    def num_tokens_to_recompute(self, block_size: int) -> int:
        """What a group that holds no blocks has to compute, what is shared once."""
        forks = self.plan_forks(block_size)
        return self.unfinished[0].num_tokens + sum(fork.child.num_tokens - fork.num_tokens for fork in forks)

    def plan_forks(self, block_size: int) -> list[Fork]:
        """How a group that holds no blocks comes to share all that it can: its first unfinished sequence is computed
        whole, and each other one forks from that before it with which it has most tokens in common.

        The fork is after a full block, so that it costs no copy, or after all tokens where they are the same.
        """
        lengths = [seq.num_tokens for seq in self.unfinished]
        if self._planned[0] != lengths:  # a group that waits is asked at every step
            self._planned = lengths, self._plan_forks(block_size)
        return self._planned[1]

    def _plan_forks(self, block_size: int) -> list[Fork]:
        first, *others = self.unfinished
        started, forks = [first], []
        for child in others:
            num_tokens, parent = 0, first
            for seq in started:
                num_common = _num_common(seq, child)
                if num_common > num_tokens:
                    num_tokens, parent = num_common, seq
                if num_common == child.num_tokens == seq.num_tokens:
                    parent = seq
                    break
            else:
                num_tokens = min(num_tokens, child.num_tokens - 1) // block_size * block_size
            forks.append(Fork(parent, child, num_tokens))
            started.append(child)
        return forks


class ForksToCome:
    """The forks of running groups whose parents have not yet computed what their children share."""

    def __init__(self):
        self._forks: list[Fork] = []

    def __len__(self) -> int:
        return len(self._forks)

    @property
    def children(self) -> list[Sequence]:
        return [fork.child for fork in self._forks]

    def add(self, forks: list[Fork]) -> None:
        self._forks += forks

    def drop(self, children: list[Sequence]) -> None:
        self._forks = [fork for fork in self._forks if fork.child not in children]

    def take_ready(self) -> list[Fork]:
        """Those whose parents hold what is shared; a parent may itself be the child of one before."""
        if not self._forks:
            return []
        ready = [
            fork
            for fork in self._forks
            if fork.parent.num_computed_tokens >= fork.num_tokens and fork.parent.block_table.blocks
        ]
        self.drop([fork.child for fork in ready])
        return ready

    def keep_busy_after(self, num_scheduled_tokens: dict[Sequence, int]) -> bool:
        """Whether some group will have tokens to compute after that step before all its sequences decode."""
        return any(
            not fork.is_whole
            or fork.parent.num_computed_tokens + num_scheduled_tokens.get(fork.parent, 0) < fork.num_tokens
            for fork in self._forks
        )


def _num_common(a: Sequence, b: Sequence) -> int:
    """How many tokens two samples of one prompt have in common before they part."""
    outputs = a.output_token_ids, b.output_token_ids
    num_output = next((i for i, (x, y) in enumerate(zip(*outputs)) if x != y), min(map(len, outputs)))
    return a.num_prompt_tokens + num_output
