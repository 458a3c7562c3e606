"""What the sampler is told of its rows, and what it answers."""

from dataclasses import dataclass, fields

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

from jpaged.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from pallas_kernels import AnyArray

MAX_STOPS = MAX_STOP_TOKEN_IDS + 16  # a request's own stop tokens and the model's ends of text


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of some rows: of the sequences that run, or of the tokens that a step samples.

    seeds are 64 bits as two words; stop_ids are filled up with -1 and may not be sampled at positions under min_length.
    """

    temperature: Float[AnyArray, "R"]
    top_p: Float[AnyArray, "R"]
    min_p: Float[AnyArray, "R"]
    top_k: Int[AnyArray, "R"]
    seeds: UInt32[AnyArray, "R 2"]
    sample_index: Int[AnyArray, "R"]
    wants_logprobs: Int[AnyArray, "R"]  # 0 or 1
    edit_slot: Int[AnyArray, "R"]  # of LogitsEdits; 0 for none
    keeps_logits: Int[AnyArray, "R"]  # 0 or 1: the host chooses from them, and the step's token is dropped
    min_length: Int[AnyArray, "R"]
    stop_ids: Int[AnyArray, "R stops"]

    @classmethod
    def shapes(cls, num_rows: int) -> "SamplingBatch":
        """One of num_rows rows as `ShapeDtypeStruct`s."""
        dtypes = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seeds": np.uint32}
        widths = {"seeds": (2,), "stop_ids": (MAX_STOPS,)}
        return cls(
            **{
                f.name: jax.ShapeDtypeStruct((num_rows, *widths.get(f.name, ())), dtypes.get(f.name, np.int32))
                for f in fields(cls)
            }
        )

    @classmethod
    def neutral(cls, num_rows: int) -> "SamplingBatch":
        """Greedy rows without any filter, as numpy arrays."""
        batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), cls.shapes(num_rows))
        batch.make_neutral()
        return batch

    def make_neutral(self) -> None:
        """Makes host rows of zeros greedy and unfiltered."""
        self.top_p.fill(1)
        self.stop_ids.fill(-1)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        stop_ids: frozenset[int],
        min_length: int,
        *,
        sample_index: int = 0,
        edit_slot: int = 0,
    ) -> None:
        """Writes the parameters of one sample of a request into a neutral host row."""
        assert len(stop_ids) <= MAX_STOPS, f"{len(stop_ids)} stop tokens"
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = max(params.top_k, 0)
        self.seeds[row] = seed >> 32, seed & 0xFFFFFFFF
        self.sample_index[row] = sample_index
        self.wants_logprobs[row] = params.needs_logprobs
        self.edit_slot[row] = edit_slot
        self.keeps_logits[row] = bool(params.logits_processors)
        self.min_length[row] = min_length
        self.stop_ids[row, : len(stop_ids)] = sorted(stop_ids)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What came of a step. The log-probs are of the model's own distribution; zeros where no row asked for them."""

    token_ids: Int[AnyArray, "*steps R"]  # a step of several decodes stacks the tokens of each; or TOKEN_ERRORS
    logprobs: Float[AnyArray, "R"]
    ranks: Int[AnyArray, "R"]
    top_ids: Int[AnyArray, "R top"]
    top_logprobs: Float[AnyArray, "R top"]

    @classmethod
    def empty(cls) -> "Sampled":
        """One of no rows, for its structure."""
        ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return cls(ids, logprobs, ids, ids[:, None], logprobs[:, None])
