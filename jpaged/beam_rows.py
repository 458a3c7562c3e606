"""BeamRows: what the beams of running groups hold, and which of their rows the device has to be told anew."""

from collections.abc import Container

from jpaged.beam_search import Move
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.sequence import Sequence


class BeamRows:
    """Moves beams with free, fork and append."""

    def __init__(self, kv: KVCacheManager):
        self.kv = kv
        self._moved: list[Sequence] = []  # whose rows on the device hold what they were before

    def mark_computed(self, beams: list[Sequence]) -> None:
        """Makes the blocks that the newest token of each has filled findable, before the beams move or end."""
        for seq in beams:
            self.kv.mark_computed(seq, seq.num_tokens - 1, seq.num_tokens)

    def move(self, beams: list[Sequence], moves: list[Move]) -> None:
        """Lets each beam go on from its parent: those of no further use are freed, the others forked, then all grow."""
        replaced = [move for move in moves if move.parent != move.beam]
        for move in replaced:
            self.kv.free(beams[move.beam])
        for move in replaced:
            child, parent = beams[move.beam], beams[move.parent]
            child.token_ids, child.block_hashes = list(parent.token_ids), list(parent.block_hashes)
            self.kv.fork(parent, child, parent.num_computed_tokens)
            self._moved.append(child)
        for move in moves:
            beams[move.beam].token_ids.append(move.token_id)

    def take_moved(self, scheduled: Container[Sequence]) -> list[Sequence]:
        """Those to be told with the step that computes the scheduled ones."""
        if not self._moved:
            return []
        taken = [seq for seq in self._moved if seq in scheduled]
        self._moved = [seq for seq in self._moved if seq not in scheduled and seq.row is not None]
        return taken
