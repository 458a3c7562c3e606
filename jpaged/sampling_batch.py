"""SamplingBatch and Sampled: what the sampler is told of a step's rows, and what it answers."""

from dataclasses import dataclass, fields

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

from jpaged.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from pallas_kernels import AnyArray

MAX_BANNED_TOKENS = MAX_STOP_TOKEN_IDS + 16  # a request's own stop tokens and the model's ends of text
NO_STATE_ROW = 2**30  # out of range: writes there are dropped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """One row a token to sample. On the host the arrays are numpy and written in place.

    seeds are 64 bits as two words; positions index the sampled token in its sequence; banned_ids are filled up with -1;
    state_rows say where on the device the sequence's newest token is kept, `NO_STATE_ROW` for padding.
    """

    temperature: Float[AnyArray, "R"]
    top_p: Float[AnyArray, "R"]
    min_p: Float[AnyArray, "R"]
    top_k: Int[AnyArray, "R"]
    seeds: UInt32[AnyArray, "R 2"]
    positions: Int[AnyArray, "R"]
    wants_logprobs: Int[AnyArray, "R"]  # 0 or 1
    banned_ids: Int[AnyArray, "R banned"]
    state_rows: Int[AnyArray, "R"]

    @classmethod
    def shapes(cls, num_rows: int) -> "SamplingBatch":
        """One of num_rows rows as `ShapeDtypeStruct`s."""
        dtypes = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seeds": np.uint32}
        widths = {"seeds": (2,), "banned_ids": (MAX_BANNED_TOKENS,)}
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
        self.banned_ids.fill(-1)
        self.state_rows.fill(NO_STATE_ROW)

    def set_row(self, row: int, params: SamplingParams, seed: int) -> None:
        """Writes a request's parameters into a host row that is also its row on the device."""
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = max(params.top_k, 0)
        self.seeds[row] = seed >> 32, seed & 0xFFFFFFFF
        self.wants_logprobs[row] = params.logprobs is not None
        self.state_rows[row] = row

    def copy_rows(self, source: "SamplingBatch", rows: np.ndarray) -> None:
        """Fills the first host rows with the given rows of source."""
        for f in fields(self):
            getattr(self, f.name)[: len(rows)] = getattr(source, f.name)[rows]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What came of a step. The log-probs are of the model's own distribution; zeros where no row asked for them."""

    token_ids: Int[AnyArray, "R"]
    logprobs: Float[AnyArray, "R"]
    ranks: Int[AnyArray, "R"]
    top_ids: Int[AnyArray, "R top"]
    top_logprobs: Float[AnyArray, "R top"]

    @classmethod
    def empty(cls) -> "Sampled":
        """One of no rows, for its structure."""
        ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return cls(ids, logprobs, ids, ids[:, None], logprobs[:, None])
