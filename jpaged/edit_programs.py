"""EditPrograms: what happens to `LogitsEdits` beside the steps, each a small program of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from jpaged.device_state import RowState
from jpaged.logits_edits import EditLoad, LogitsEdits, count_tokens, load_edits
from jpaged.packing import Packing
from jpaged.program_cache import ProgramCache
from jpaged.sampler import choose_tokens, logprobs_of
from jpaged.sampling_batch import Sampled
from jpaged.step import StepFunction
from pallas_kernels import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessedRow:
    """A row's logits as its request's processors have left them."""

    row_id: Int[AnyArray, "1"]
    position: Int[AnyArray, "1"]  # of the token that is chosen from them
    logits: Float[AnyArray, "1 V"]

    @classmethod
    def packing(cls, vocab_size: int) -> Packing:
        one = jax.ShapeDtypeStruct((1,), np.int32)
        return Packing(cls(one, one, jax.ShapeDtypeStruct((1, vocab_size), np.float32)))


def choose_processed(
    rows: RowState, edits: LogitsEdits, row: ProcessedRow, *, max_logprobs: int
) -> tuple[LogitsEdits, Sampled]:
    """The token of one row, with the log-probs of the model's own logits, which the slot has kept."""
    sampling = jax.tree.map(lambda table: table[row.row_id], rows.sampling)
    token_ids = choose_tokens(row.logits, sampling, edits, row.position)
    own = edits.kept[sampling.edit_slot]
    described = logprobs_of(own, token_ids, sampling.wants_logprobs > 0, max_logprobs=max_logprobs)
    return count_tokens(edits, sampling.edit_slot, token_ids), Sampled(token_ids, *described)


class EditPrograms:
    """Those of an engine: `load`, and the two for logits processors, which stand in its table of programs by `KEYS`."""

    KEYS = ("kept", "processed")

    def __init__(self, step: StepFunction, table_width: int, cache: ProgramCache):
        self._cache = cache
        self._max_logprobs = step.config.max_logprobs
        self._vocab_size = step.model.vocab_size
        self._state = step.state(2, table_width)
        self._shardings = step.state_shardings
        self._replicated = step.replicated
        self._edits_structure = jax.tree.structure(self._state.edits)
        self.load = self._compile_load()  # (edits, packed `EditLoad`) -> edits

    def _compile_load(self):
        packing = EditLoad.packing(self._vocab_size)
        load = jax.jit(
            lambda edits, buffer: load_edits(edits, packing.unpack(buffer)),
            donate_argnums=0,
            out_shardings=self._shardings.edits,
        )
        arguments = self._state.edits, self._buffer(packing.size)
        return self._cache.compile(("edits",), load, arguments, self._edits_structure)

    def compile(self, key: str) -> Callable:
        """kept: (edits, slot) -> the logits that the last step has kept of it. processed: (rows, edits, packed
        `ProcessedRow`) -> the edits, which are donated, with the row's token counted, and the token."""
        return {"kept": self._compile_kept, "processed": self._compile_processed}[key]()

    def _compile_kept(self):
        take = jax.jit(lambda edits, slot: edits.kept[slot[0]], out_shardings=self._replicated)
        return self._cache.compile(("kept",), take, (self._state.edits, self._buffer(1)), jax.tree.structure(0))

    def _compile_processed(self):
        packing = ProcessedRow.packing(self._vocab_size)
        program = jax.jit(
            lambda rows, edits, buffer: choose_processed(
                rows, edits, packing.unpack(buffer), max_logprobs=self._max_logprobs
            ),
            donate_argnums=1,
            out_shardings=(self._shardings.edits, self._replicated),
        )
        arguments = self._state.rows, self._state.edits, self._buffer(packing.size)
        structure = jax.tree.structure((self._state.edits, Sampled.empty()))
        return self._cache.compile(("processed",), program, arguments, structure)

    def _buffer(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self._replicated)
