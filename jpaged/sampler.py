"""sample(logits, parameters) -> tokens and log-probs: one program for every mix of requests."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jpaged.errors import NOT_FINITE, NOTHING_ALLOWED
from jpaged.logits_edits import LogitsEdits, edit_logits
from jpaged.sampling_batch import Sampled, SamplingBatch
from jpaged.wanted_rows import of_wanted_rows
from models.layers import largest, sum_alone


def _run_length(vocab: int) -> int:
    """The vocabulary is summed in runs of this many tokens, about a vector register of a TPU.

    Where it can be, a run divides an eighth of the vocabulary: on a mesh no run then lies on two devices. With runs
    that do, XLA gathers the logits of half the vocabulary on every device.
    """
    part = vocab // math.gcd(vocab, 8)
    return next((length for length in range(128, 63, -16) if part % length == 0), 128)


@jax.named_scope("sample")
def sample(
    logits: Float[Array, "R V"],
    batch: SamplingBatch,
    edits: LogitsEdits,
    positions: Int[Array, "R"],
    targets: Int[Array, "R"],
    *,
    max_logprobs: int,
) -> Sampled:
    """Draws one token a row; positions are those that the tokens will have in their sequences. A row with a target,
    a token that follows in its prompt, returns the log-probs of that.

    A row's draw is a function of its logits, its edits, its seed, its sample's index and its position alone. Work that few
    rows need is done for these alone, some at a time, in loops on the device, so a mix of requests never compiles anew. A
    row without a token to draw gets a key of `TOKEN_ERRORS`.
    """
    token_ids = choose_tokens(logits, batch, edits, positions)
    wants_logprobs = (batch.wants_logprobs > 0) | (targets >= 0)
    described = jnp.where(targets >= 0, targets, token_ids)
    return Sampled(token_ids, *logprobs_of(logits, described, wants_logprobs, max_logprobs=max_logprobs))


def choose_tokens(
    logits: Float[Array, "R V"], batch: SamplingBatch, edits: LogitsEdits, positions: Int[Array, "R"]
) -> Int[Array, "R"]:
    """The token of each row, or an error."""
    must_go_on = positions < batch.min_length
    is_edited = must_go_on | (batch.edit_slot > 0)
    is_plain = ~is_edited & (batch.temperature <= 0)

    def edit_and_draw(rows, _):
        of_rows = logits, batch, positions, is_edited, must_go_on
        return _edit_and_draw(edits, *jax.tree.map(lambda table: table[rows], of_rows))

    # What a cond returns is copied, from the branch that does nothing too: so tokens leave it, and never the logits.
    greedy = jax.lax.cond(jnp.any(is_plain), lambda x: _best(x)[0], lambda x: jnp.zeros(len(x), jnp.int32), logits)
    return of_wanted_rows(edit_and_draw, ~is_plain, greedy)


def _edit_and_draw(edits: LogitsEdits, logits, batch: SamplingBatch, positions, is_edited, must_go_on):
    scaled = logits / jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    scaled = edit_logits(scaled, edits, batch, is_edited, must_go_on)
    greedy, top = _best(scaled)
    return jax.lax.cond(
        jnp.any(batch.temperature > 0), _draw, lambda x, b, p, g, t: g, scaled, batch, positions, greedy, top
    )


def _best(x: Float[Array, "R V"]) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """(the best token or an error, the largest logit) of each row."""
    token_ids, top = _argmax(x)
    error = jnp.where(top == -jnp.inf, NOTHING_ALLOWED, NOT_FINITE)
    return jnp.where(jnp.isfinite(top), token_ids, error), top


def _draw(scaled, batch: SamplingBatch, positions, greedy, top):
    """Inverse transform sampling from the filtered distribution; greedy rows keep their token, and errors stay."""
    scaled = scaled - top[:, None]
    threshold = _filter_threshold(scaled, batch)
    weights = jnp.where(_order(scaled) >= threshold[:, None], jnp.exp(scaled), 0.0)
    drawn = _inverse_cdf(weights, _uniform(batch.seeds, batch.sample_index, positions))
    return jnp.where((batch.temperature > 0) & (greedy >= 0), drawn, greedy)


def _uniform(
    seeds: UInt32[Array, "R 2"], sample_index: Int[Array, "R"], positions: Int[Array, "R"]
) -> Float[Array, "R"]:
    """In [0, 1): a function of (seed, the sample's index, position)."""

    def one(seed, index, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), position))

    return jax.vmap(one)(seeds, sample_index, positions)


def _order(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the same order as the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _filter_threshold(scaled: Float[Array, "R V"], batch: SamplingBatch) -> Int[Array, "R"]:
    """The order value of the least likely token that min_p, top_k and top_p, in this order, let pass.

    Tokens tied with the last one pass with it. scaled has its maximum at 0.
    """
    lowest = jnp.iinfo(jnp.int32).min
    order = _order(scaled)
    log_min_p = jnp.where(batch.min_p > 0, jnp.log(batch.min_p), -jnp.inf)
    by_min_p = _order(log_min_p[:, None])[:, 0]

    def top_k(_):
        found = _largest_threshold(order, jnp.ones_like(scaled), batch.top_k.astype(jnp.float32))
        return jnp.where(batch.top_k > 0, found, lowest)

    threshold = jnp.maximum(
        by_min_p, jax.lax.cond(jnp.any(batch.top_k > 0), top_k, lambda _: jnp.full_like(by_min_p, lowest), None)
    )

    def top_p(threshold):
        weights = jnp.where(order >= threshold[:, None], jnp.exp(scaled), 0.0)
        found = _largest_threshold(order, weights, batch.top_p * _vocab_sum(weights))
        found = jnp.minimum(found, _order(jnp.float32(0)))  # a top_p that rounds to no mass keeps the best token
        return jnp.where(batch.top_p < 1, jnp.maximum(found, threshold), threshold)

    return jax.lax.cond(jnp.any(batch.top_p < 1), top_p, lambda t: t, threshold)


def _largest_threshold(order: Int[Array, "R V"], weights: Float[Array, "R V"], target: Float[Array, "R"]):
    """The largest t with sum(weights where order >= t) >= target, bit by bit: 32 passes, exact, and no sort."""

    def narrow(i, low):
        # Bits are decided from the top; the sum runs in uint32 order, whose sign bit is flipped.
        candidate = low | (jnp.uint32(1) << (31 - i))
        signed = jax.lax.bitcast_convert_type(candidate ^ jnp.uint32(0x80000000), jnp.int32)
        mass = _vocab_sum(jnp.where(order >= signed[:, None], weights, 0.0))
        return jnp.where(mass >= target, candidate, low)

    found = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(order.shape[0], jnp.uint32))
    return jax.lax.bitcast_convert_type(found ^ jnp.uint32(0x80000000), jnp.int32)


def _runs(x: Float[Array, "R V"], padding: float = 0.0) -> Float[Array, "R runs length"]:
    rows, vocab = x.shape
    length = _run_length(vocab)
    return jnp.pad(x, ((0, 0), (0, -vocab % length)), constant_values=padding).reshape(rows, -1, length)


def _argmax(x: Float[Array, "R V"]) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """(first of the largest, largest), by reductions across vectors: a fifth of jnp.argmax's time on CPU."""
    rows, vocab = x.shape
    runs = _runs(x, -jnp.inf)
    top = jnp.max(largest(runs, axis=1), axis=1)
    run = jnp.arange(runs.shape[1], dtype=jnp.int32)[:, None]
    first_run = jnp.min(jnp.where(runs == top[:, None, None], run, vocab), axis=1)
    length = runs.shape[2]
    token = jnp.where(first_run < vocab, first_run * length + jnp.arange(length), vocab - 1)
    return jnp.min(token, axis=1), top


def _vocab_sum(x: Float[Array, "R V"]) -> Float[Array, "R"]:
    across = sum_alone(_runs(x), axis=1)  # across vectors: fast on CPU
    return sum_alone(jax.lax.optimization_barrier(across), axis=1)  # XLA would make one sum of both, of many rows


def _inverse_cdf(weights: Float[Array, "R V"], uniform: Float[Array, "R"]) -> Int[Array, "R"]:
    """The first token whose cumulative weight passes uniform * total, found in two levels: the run, then the token.

    Tokens of weight 0 are left out by name: cumsum adds in a tree, so an entry after one can be a rounding larger.
    """
    runs = _runs(weights)
    run_sums = sum_alone(runs, axis=2)
    run_ends = jnp.cumsum(run_sums, axis=1)
    passable = jnp.where(run_sums > 0, run_ends, 0.0)
    target = uniform * jnp.max(passable, axis=1)
    run = jnp.argmax(passable > target[:, None], axis=1)
    row = jnp.arange(runs.shape[0])
    residual = target - jnp.where(run > 0, run_ends[row, run - 1], 0.0)
    inside = runs[row, run]
    ends = jnp.where(inside > 0, jnp.cumsum(inside, axis=1), 0.0)
    # Rounding can leave the run's own sum a hair under the residual: then its last positive token is meant.
    residual = jnp.clip(residual, 0.0, jnp.nextafter(jnp.max(ends, axis=1), jnp.float32(0)))
    return (run * runs.shape[2] + jnp.argmax(ends > residual[:, None], axis=1)).astype(jnp.int32)


def logprobs_of(
    logits: Float[Array, "R V"], token_ids: Int[Array, "R"], are_wanted: Bool[Array, "R"], *, max_logprobs: int
):
    """(log-prob, rank) of each wanted row's token, (ids, log-probs) of the best; zeros of others."""
    num_rows = len(logits)
    none = jnp.zeros(num_rows, jnp.float32), jnp.zeros(num_rows, jnp.int32)
    none_of_best = (jnp.zeros((num_rows, max_logprobs), dtype) for dtype in (jnp.int32, jnp.float32))

    def compute(rows, _):
        return _logprobs(logits[rows], token_ids[rows], max_logprobs)

    return of_wanted_rows(compute, are_wanted, (*none, *none_of_best))


def _logprobs(logits, token_ids, max_logprobs: int):
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jax.lax.optimization_barrier(jnp.exp(shifted))  # fused into a sum it is another approximation
    logprobs = shifted - jnp.log(_vocab_sum(weights))[:, None]
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, max_logprobs)
    return chosen[:, 0], ranks, top_ids, top_logprobs
