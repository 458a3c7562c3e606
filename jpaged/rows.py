"""Rows: the places on the device that running sequences hold."""

from jpaged.sequence import Sequence


class Rows:
    """Every running sequence has a row; one that edits its logits also has a slot, of which there are fewer."""

    def __init__(self, max_num_seqs: int, max_num_edited_seqs: int):
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._free_edit_slots = list(range(1, max_num_edited_seqs + 1))[::-1]

    def have_places_for(self, seqs: list[Sequence]) -> bool:
        num_edited = sum(seq.params.edits_logits for seq in seqs)
        return len(seqs) <= len(self._free_rows) and num_edited <= len(self._free_edit_slots)

    def take(self, seq: Sequence) -> None:
        """Gives seq its places; there must be some."""
        seq.row = self._free_rows.pop()
        if seq.params.edits_logits:
            seq.edit_slot = self._free_edit_slots.pop()

    def give_back(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        seq.row = None
        if seq.edit_slot:
            self._free_edit_slots.append(seq.edit_slot)
            seq.edit_slot = 0
