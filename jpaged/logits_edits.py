"""LogitsEdits: what a request changes of its logits before a token is chosen: penalties, biases and banned words.

The state of a row is as wide as the vocabulary. So only sequences that ask for it hold some: each has a slot, and
whoever finds none free waits in the queue. A step counts the tokens that it samples itself, before the host has seen
them; a sequence that comes back from preemption is counted anew from its tokens.
"""

from dataclasses import dataclass, fields, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jpaged.packing import Packing
from jpaged.sampling_batch import SamplingBatch
from jpaged.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS, SamplingParams
from jpaged.wanted_rows import some_at_a_time
from pallas_kernels import AnyArray

IN_PROMPT = 1 << 30  # a bit of `seen`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsEdits:
    """By slot; slot 0 changes nothing and belongs to all who edit nothing."""

    seen: Int[AnyArray, "Q V"]  # how often a token is in the output so far, and IN_PROMPT if it is in the prompt
    bias: Float[AnyArray, "Q V"]  # minus infinity for a token that is not allowed
    repetition: Float[AnyArray, "Q"]
    presence: Float[AnyArray, "Q"]
    frequency: Float[AnyArray, "Q"]
    kept: Float[AnyArray, "Q V"]  # the logits that the host is to process
    newest: Int[AnyArray, "Q prefix"]  # the last tokens of the output, -1 where it has had fewer
    bad_words: Int[AnyArray, "Q words length"]  # the last token is banned after the others; -1 stands for any or none

    @classmethod
    def shapes(cls, num_slots: int, vocab_size: int) -> "LogitsEdits":
        """One of num_slots slots as `ShapeDtypeStruct`s."""
        whole, length = {"seen", "newest", "bad_words"}, MAX_BAD_WORD_TOKENS
        widths = {
            "seen": (vocab_size,), "bias": (vocab_size,), "kept": (vocab_size,), "newest": (length - 1,),
            "bad_words": (MAX_BAD_WORD_SEQUENCES, length),
        }  # fmt: skip
        return cls(
            **{
                f.name: jax.ShapeDtypeStruct(
                    (num_slots, *widths.get(f.name, ())), np.int32 if f.name in whole else np.float32
                )
                for f in fields(cls)
            }
        )

    @classmethod
    def neutral(cls, num_slots: int, vocab_size: int) -> "LogitsEdits":
        """Slots that change nothing, as numpy arrays."""
        edits = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), cls.shapes(num_slots, vocab_size))
        edits.make_neutral()
        return edits

    def make_neutral(self) -> None:
        """Makes host slots of zeros change nothing."""
        self.repetition.fill(1)
        self.newest.fill(-1)
        self.bad_words.fill(-1)

    def set_slot(
        self, slot: int, params: SamplingParams, prompt: list[int], output: list[int], bad_words: list[list[int]]
    ) -> None:
        """Writes a request's edits, and the tokens that it has so far, into a neutral host slot."""
        self.seen[slot] = np.bincount(output, minlength=self.seen.shape[1]) if output else 0
        self.seen[slot, prompt] |= IN_PROMPT
        if params.allowed_token_ids is not None:
            self.bias[slot] = -np.inf
            self.bias[slot, list(params.allowed_token_ids)] = 0
        if params.logit_bias:
            self.bias[slot, list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot], self.frequency[slot] = params.presence_penalty, params.frequency_penalty
        newest = output[-self.newest.shape[1] :]
        self.newest[slot, self.newest.shape[1] - len(newest) :] = newest
        for row, word in zip(self.bad_words[slot], bad_words, strict=False):
            row[len(row) - len(word) :] = word


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EditLoad:
    """New content for one slot: of a sequence that is admitted."""

    slot: Int[AnyArray, "1"]
    edits: LogitsEdits

    @classmethod
    @cache
    def packing(cls, vocab_size: int) -> Packing:
        return Packing(cls(jax.ShapeDtypeStruct((1,), np.int32), LogitsEdits.shapes(1, vocab_size)))


def load_edits(edits: LogitsEdits, load: EditLoad) -> LogitsEdits:
    """The edits with one slot replaced."""

    def put(table, value):
        return jax.lax.dynamic_update_index_in_dim(table, value[0], load.slot[0], 0)

    return jax.tree.map(put, edits, load.edits)


def keep_logits(edits: LogitsEdits, logits: Float[Array, "R V"], batch: SamplingBatch) -> LogitsEdits:
    """The edits with the logits of the rows that keep theirs, one after the other: there are few, and mostly none."""
    num_kept = jnp.sum(batch.keeps_logits)

    def keep_one(carry):
        index, kept = carry
        row = jnp.argmax(jnp.cumsum(batch.keeps_logits) > index)
        return index + 1, jax.lax.dynamic_update_index_in_dim(kept, logits[row], batch.edit_slot[row], 0)

    return replace(edits, kept=jax.lax.while_loop(lambda carry: carry[0] < num_kept, keep_one, (0, edits.kept))[1])


def count_tokens(edits: LogitsEdits, slots: Int[Array, "R"], token_ids: Int[Array, "R"]) -> LogitsEdits:
    """The edits after each row has sampled its token. Rows of slot 0, and tokens under 0, count nothing."""
    slots = jnp.where((slots > 0) & (token_ids >= 0), slots, len(edits.seen))  # out of range: dropped
    newest = jnp.concatenate([edits.newest[slots, 1:], token_ids[:, None]], axis=1)
    return replace(
        edits,
        seen=edits.seen.at[slots, token_ids].add(1, mode="drop"),
        newest=edits.newest.at[slots].set(newest, mode="drop"),
    )


@jax.named_scope("edit_logits")
def edit_logits(
    scaled: Float[Array, "R V"],
    edits: LogitsEdits,
    batch: SamplingBatch,
    is_edited: Bool[Array, "R"],
    must_go_on: Bool[Array, "R"],
) -> Float[Array, "R V"]:
    """Edits the rows that is_edited names, some at a time and in place; the others cost nothing.

    scaled are the logits, divided by the temperature where a row has one: so are the biases and penalties then. Rows
    that must_go_on may not sample their stop tokens.
    """

    def edit(rows, scaled):
        banned = jnp.where(must_go_on[rows, None], batch.stop_ids[rows], -1)
        temperature = jnp.where(batch.temperature[rows] > 0, batch.temperature[rows], 1.0)
        return _edit(scaled[rows], edits, batch.edit_slot[rows], temperature, banned)

    return some_at_a_time(edit, is_edited, scaled)


def _edit(x, edits: LogitsEdits, slots, temperature, banned):
    """Bias, then repetition_penalty, then the other two, then bans: vLLM's order, but for bans, which win anyway."""
    seen = edits.seen[slots]
    count = seen & (IN_PROMPT - 1)
    x = x + edits.bias[slots] / temperature[:, None]
    repetition = edits.repetition[slots][:, None]
    x = jnp.where(seen != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    presence, frequency = (table[slots] / temperature for table in (edits.presence, edits.frequency))
    x = x - (frequency[:, None] * count + presence[:, None] * (count > 0))
    words, newest = edits.bad_words[slots], edits.newest[slots]
    prefixes = words[:, :, :-1]
    is_due = jnp.all((prefixes < 0) | (prefixes == newest[:, None, :]), axis=2)
    banned = jnp.concatenate([banned, jnp.where(is_due, words[:, :, -1], -1)], axis=1)
    columns = jnp.where(banned >= 0, banned, x.shape[1])  # out of range: dropped
    return x.at[jnp.arange(len(x))[:, None], columns].set(-jnp.inf, mode="drop")
