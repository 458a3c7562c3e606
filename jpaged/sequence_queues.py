"""SequenceQueues: which sequences wait, which run, and in which rows."""

from collections import deque

from jpaged.kv_cache_manager import KVCacheManager
from jpaged.rows import Rows
from jpaged.sequence import Sequence, SequenceStatus, insert_in_order
from jpaged.sequence_group import ForksToCome
from jpaged.swapping import discard_swapped


class SequenceQueues:
    """Every sequence that has not ended is in one of three places: it waits, it runs, or it is a fork to come of one that
    runs. One that runs has a row and holds blocks; the others have neither.
    """

    def __init__(self, rows: Rows, kv: KVCacheManager):
        self.rows, self.kv = rows, kv
        self.waiting: deque[Sequence] = deque()  # by their order, in which a group's follow one another
        self.running: list[Sequence] = []  # likewise
        self.forks = ForksToCome()
        self._num_arrived = 0

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.forks.children, *self.waiting]

    def add(self, seq: Sequence) -> None:
        seq.order = seq.params.priority, self._num_arrived
        self._num_arrived += 1
        insert_in_order(self.waiting, seq)

    def have_places_for(self, seqs: list[Sequence]) -> bool:
        """Whether they could all run, beside those that run and their forks to come."""
        return self.rows.have_places_for(seqs + self.forks.children)

    def start(self, seq: Sequence) -> None:
        """Gives a row to a sequence that holds its first blocks."""
        insert_in_order(self.running, seq)
        seq.status = SequenceStatus.RUNNING
        self.rows.take(seq)

    def preempt(self, seq: Sequence) -> list[Sequence]:
        """Sends a sequence, and with it all of its group, back to its place in the queue; returns all that went."""
        group = [seq] if seq.group is None else seq.group.unfinished
        self.forks.drop(group)
        for member in group:
            if member.status is SequenceStatus.RUNNING:
                self._release(member)
            member.status = SequenceStatus.WAITING
            insert_in_order(self.waiting, member)
        return group

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence, wherever it is, and frees its blocks at once. Ending it twice changes nothing."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        elif seq in self.forks.children:
            self.forks.drop([seq])
        else:
            self.waiting.remove(seq)
            discard_swapped(self.kv, seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def _release(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.free(seq)
        self.rows.give_back(seq)
        seq.num_pending = seq.num_drafted = 0
