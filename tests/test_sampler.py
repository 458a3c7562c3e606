"""sample(): the distribution that the request asked for, drawn by nothing but its own seed and position.

The specification is `reference_weights` and `reference_draw`, in float64 numpy with sorts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_backend import equal_bits_on_cpu
from scipy import stats

from jpaged.errors import NOT_FINITE
from jpaged.logits_edits import LogitsEdits
from jpaged.sampler import _inverse_cdf, sample
from jpaged.sampling_batch import MAX_STOPS, Sampled, SamplingBatch
from jpaged.sampling_params import SamplingParams

MAX_LOGPROBS = 5
ROWS, VOCAB = 256, 300  # the shape that most tests share: a compilation takes seconds
run = jax.jit(sample, static_argnames="max_logprobs")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def make_batch(
    params: list[dict], *, seeds=None, positions=None, indices=None, banned=None
) -> tuple[SamplingBatch, np.ndarray]:
    """Rows and their positions. Every row has a stop token; the banned ones may not stop yet."""
    batch = SamplingBatch.neutral(len(params))
    positions = np.zeros(len(params), np.int32) if positions is None else np.asarray(positions, np.int32)
    for row, one in enumerate(params):
        bans = frozenset(banned[row] if banned else ())
        seed = int(seeds[row]) if seeds is not None else row
        min_length = int(positions[row]) + 1 if bans else int(positions[row])
        batch.set_row(
            row, SamplingParams(**one), seed, bans or frozenset({0}), min_length,
            sample_index=0 if indices is None else indices[row],
        )  # fmt: skip
    return batch, positions


def padded_rows(batch: SamplingBatch, positions, rows, num_rows: int):
    """Some rows of a batch, filled up with neutral ones."""
    into = SamplingBatch.neutral(num_rows), np.zeros(num_rows, np.int32)
    for target, source in zip(jax.tree.leaves(into), jax.tree.leaves((batch, positions)), strict=True):
        target[: len(rows)] = source[rows]
    return into


def run_exactly(logits, batch: SamplingBatch, positions) -> Sampled:
    """One call in the shape of its arguments."""
    logits = np.asarray(logits, np.float32)
    targets = np.full(len(logits), -1, np.int32)
    edits, max_logprobs = LogitsEdits.neutral(1, logits.shape[1]), min(MAX_LOGPROBS, logits.shape[1])
    return jax.tree.map(np.asarray, run(logits, batch, edits, positions, targets, max_logprobs=max_logprobs))


def draw(logits, params: list[dict], *, pad_vocab=True, **options) -> Sampled:
    """Draws in the shared shape: rows in chunks filled up with greedy ones, and impossible tokens after the real ones."""
    (batch, positions), logits = make_batch(params, **options), np.asarray(logits, np.float32)
    if pad_vocab and logits.shape[1] < VOCAB:
        logits = np.pad(logits, ((0, 0), (0, VOCAB - logits.shape[1])), constant_values=-np.inf)
    parts = []
    for rows in np.split(np.arange(len(logits)), range(ROWS, len(logits), ROWS)):
        padded = np.zeros((ROWS, logits.shape[1]), np.float32)
        padded[: len(rows)] = logits[rows]
        sampled = run_exactly(padded, *padded_rows(batch, positions, rows, ROWS))
        parts.append(jax.tree.map(lambda x: x[: len(rows)], sampled))
    return jax.tree.map(lambda *chunks: np.concatenate(chunks), *parts)


def reference_weights(logits, *, temperature, top_k, top_p, min_p):
    """Unnormalised probabilities after temperature, min_p, top_k and top_p; what ties with the last one passes too."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p[p < min_p] = 0  # the best token has 1
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    if top_p < 1:
        falling = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(falling), top_p * falling.sum())  # the first whose sum reaches top_p
        p[p < falling[min(last, len(p) - 1)]] = 0
    return p


def reference_uniform(seed: int, position: int, index: int = 0) -> float:
    """What the request's seed, the sample's index and the position give, one row at a time."""
    key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), impl="threefry2x32")
    return float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), position)))


def reference_draw(logits, params, uniform):
    """The inverse of the cumulative distribution; None where rounding may decide: at an edge of it or of a filter."""
    near = [
        reference_weights(logits, **{**params, "top_p": min(1, params["top_p"] * a), "min_p": params["min_p"] * b})
        for a in (1 - 1e-5, 1, 1 + 1e-5)
        for b in (1 - 1e-5, 1, 1 + 1e-5)
    ]
    weights = near[4]
    if params["top_p"] < 1 and any(((w > 0) != (weights > 0)).any() for w in near):
        return None
    cdf = np.cumsum(weights) / weights.sum()
    if np.abs(cdf[weights > 0][:-1] - uniform).min(initial=1) < 1e-5:
        return None
    return int(np.argmax(cdf > uniform))


MIXES = [
    {},
    {"temperature": 0.7},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100000},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"top_p": 1e-30},
    {"min_p": 0.1},
    {"min_p": 0.9},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.001},
]


@pytest.mark.parametrize("vocab", [2, 128, 129, VOCAB])
def test_draw_is_the_inverse_cdf_of_the_float64_specification(vocab):
    rng = np.random.default_rng(vocab)
    params = [mix for mix in MIXES for _ in range(30)]
    logits = rng.normal(size=(len(params), vocab)) * rng.choice([0.5, 2, 6], size=(len(params), 1))
    logits = logits.astype(np.float32)
    seeds = [int(seed) for seed in rng.integers(0, 2**64, len(params), dtype=np.uint64)]
    positions = rng.integers(1, 2**20, len(params))
    indices = rng.integers(0, 4, len(params))
    got = draw(logits, params, seeds=seeds, positions=positions, indices=indices, pad_vocab=False).token_ids
    num_unclear = 0
    for row, mix in enumerate(params):
        expected = reference_draw(logits[row], OFF | mix, reference_uniform(seeds[row], positions[row], indices[row]))
        num_unclear += expected is None
        assert expected is None or got[row] == expected, (mix, row)
    assert num_unclear < 0.05 * len(params)


def test_tied_logits_pass_a_filter_together():
    logits = np.tile([0.0, 2.0, -1.0, 2.0, 2.0, 1.0], (300, 1))
    for mix in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.05}, {"top_p": 0.5}, {"min_p": 1.0}):
        assert set(draw(logits, [mix] * 300).token_ids) == {1, 3, 4}, mix


def test_filters_apply_in_the_order_min_p_top_k_top_p():
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.tile(np.log(p), (300, 1))
    # of 0.4, 0.3, 0.2 after top_k the first two are 0.78; of all four they are 0.7
    assert set(draw(logits, [{"top_k": 3, "top_p": 0.75}] * 300).token_ids) == {0, 1}
    assert set(draw(logits, [{"top_p": 0.75}] * 300).token_ids) == {0, 1, 2}
    # min_p 0.6 leaves 0.4, 0.3: the first alone is 0.57; of all four it is 0.4
    assert set(draw(logits, [{"min_p": 0.6, "top_p": 0.55}] * 300).token_ids) == {0}
    assert set(draw(logits, [{"top_p": 0.55}] * 300).token_ids) == {0, 1}


@pytest.mark.parametrize(
    "mix",
    [{}, {"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.3}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_follow_the_distribution(mix, vary):
    num_draws = 4096
    logits = np.array([1.0, -0.5, 0.2, 2.0, 0.0, -3.0, 1.5, 0.9], np.float32)
    many, one = np.arange(num_draws), np.full(num_draws, 7)
    seeds, positions = (many, one) if vary == "seed" else (one, many)
    got = draw(np.tile(logits, (num_draws, 1)), [mix] * num_draws, seeds=seeds, positions=positions).token_ids
    weights = reference_weights(logits, **(OFF | mix))
    counts = np.bincount(got, minlength=len(logits))
    assert (counts[weights == 0] == 0).all()
    kept = weights > 0
    assert stats.chisquare(counts[kept], num_draws * weights[kept] / weights.sum()).pvalue > 1e-3


def test_draws_at_successive_positions_and_seeds_are_independent():
    num = 4096
    logits = np.zeros((num, 4), np.float32)
    for seeds, positions in ((np.full(num, 3), np.arange(num)), (np.arange(num), np.full(num, 3))):
        got = draw(logits, [{}] * num, seeds=seeds, positions=positions).token_ids
        pairs = np.bincount(got[:-1] * 4 + got[1:], minlength=16)
        assert stats.chisquare(pairs).pvalue > 1e-3


def test_all_64_bits_of_the_seed_count():
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
    logits = np.zeros((len(seeds), VOCAB))
    assert len(set(draw(logits, [{}] * len(seeds), seeds=seeds).token_ids)) == len(seeds)


def random_rows(num_rows, vocab, seed=0):
    rng = np.random.default_rng(seed)
    params = [MIXES[i % len(MIXES)] | ({"temperature": 0.0} if i % 5 == 4 else {}) for i in range(num_rows)]
    params = [one | {"logprobs": 3 if i % 3 == 0 else None} for i, one in enumerate(params)]
    return (
        rng.normal(size=(num_rows, vocab)).astype(np.float32) * 3,
        params,
        [int(seed) for seed in rng.integers(0, 2**64, num_rows, dtype=np.uint64)],
        rng.integers(1, 1000, num_rows),
        [[int(t) for t in rng.integers(0, vocab, 2)] if i % 4 == 0 else [] for i in range(num_rows)],
    )


def test_draw_depends_on_neither_neighbours_nor_row_nor_padding():
    logits, params, seeds, positions, banned = random_rows(24, 300)
    together = draw(logits, params, seeds=seeds, positions=positions, banned=banned).token_ids
    for row in range(0, 24, 5):
        batch = make_batch([params[row]], seeds=[seeds[row]], positions=[positions[row]], banned=[banned[row]])
        assert run_exactly(logits[[row]], *batch).token_ids[0] == together[row]
    order = np.random.default_rng(1).permutation(24)
    batch = padded_rows(*make_batch(params, seeds=seeds, positions=positions, banned=banned), order, 40)
    padded = np.concatenate([logits[order], np.full((16, 300), np.nan, np.float32)])
    assert run_exactly(padded, *batch).token_ids[:24].tolist() == together[order].tolist()


@equal_bits_on_cpu
@pytest.mark.parametrize(
    "vocab, sizes",
    [
        (258, (1, 2, 10, 16, 48)),  # 1, 2, 16 and the 64 of the whole are compiled for the next test, too
        pytest.param(258, (3, 6, 8, 24, 32), marks=pytest.mark.long),
        pytest.param(4096, (1, 2, 3, 6, 8, 10, 16, 24, 32, 48), marks=pytest.mark.long),
    ],
)
def test_a_rows_token_and_log_probs_are_the_same_to_the_bit_in_every_step(vocab, sizes):
    logits, params, seeds, positions, banned = random_rows(64, vocab)
    params = [one | {"logprobs": 3} for one in params]
    batch = make_batch(params, seeds=seeds, positions=positions, banned=banned)
    together, rng = run_exactly(logits, *batch), np.random.default_rng(0)
    for num_rows in sizes:
        rows = rng.permutation(64)[:num_rows]
        got = run_exactly(logits[rows], *padded_rows(*batch, rows, num_rows))
        jax.tree.map(lambda one, every: np.testing.assert_array_equal(one, every[rows]), got, together)


@pytest.mark.parametrize("vocab", [258, 4096])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 64])
@pytest.mark.parametrize("mix", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_row_with_any_logit_that_is_no_number_is_an_error_in_every_step(num_rows, vocab, mix):
    """XLA:CPU's library leaves NaN out of the maximum of a large array."""
    logits = np.random.default_rng(0).normal(size=(num_rows, vocab)).astype(np.float32)
    batch = make_batch([mix] * num_rows)
    expected = run_exactly(logits, *batch).token_ids[1:]
    for wrong in (slice(None), slice(vocab // 2, vocab // 2 + 1), slice(0, 1), slice(vocab - 1, None)):
        for what in (np.nan, np.inf):
            bad = logits.copy()
            bad[0, wrong] = what
            got = run_exactly(bad, *batch).token_ids
            assert got[0] == NOT_FINITE and (got[1:] == expected).all()


def test_all_rows_at_once_are_what_they_are_in_groups(monkeypatch):
    """What other backends than a CPU run."""
    logits, params, seeds, positions, banned = random_rows(24, 300)
    batch, positions = make_batch(params, seeds=seeds, positions=positions, banned=banned)
    rest = batch, LogitsEdits.neutral(1, 300), positions, np.full(24, -1, np.int32)
    in_groups = jax.tree.map(np.asarray, run(logits, *rest, max_logprobs=MAX_LOGPROBS))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    at_once = jax.jit(lambda *args: sample(*args, max_logprobs=MAX_LOGPROBS))(logits, *rest)
    for one, other in zip(jax.tree.leaves(in_groups), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_one_program_serves_every_mix():
    logits, *_ = random_rows(4, VOCAB)
    draw(logits, [{}] * 4)
    num_programs = run._cache_size()
    for mix in [{"temperature": 0.0}, {"logprobs": 2}, *MIXES]:
        draw(logits, [mix] * 4, banned=[[1], [], [], []])
        draw(logits, [mix, {"temperature": 0.0}, {}, {"top_p": 0.5}])
    assert run._cache_size() == num_programs


@pytest.mark.parametrize("vocab", [2, 128, 129, VOCAB])
def test_greedy_is_the_first_of_the_best(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.integers(0, 6, (64, vocab)).astype(np.float32)  # full of ties
    logits[1] = 3.0
    logits[1, -1] = 4.0
    logits[2] = -np.inf
    logits[2, vocab // 2] = -1e30
    for mix in (
        {"temperature": 0.0},
        {"temperature": 9e-6},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.5},
    ):
        assert draw(logits, [mix] * 64, pad_vocab=False).token_ids.tolist() == np.argmax(logits, axis=1).tolist()


def test_greedy_rows_keep_their_token_beside_random_ones():
    logits, *_ = random_rows(32, 200)
    got = draw(logits, [{"temperature": 0.0}, {"temperature": 50.0}] * 16).token_ids
    assert (got[::2] == logits.argmax(axis=1)[::2]).all() and (got[1::2] != logits.argmax(axis=1)[1::2]).any()


EXTREMES = [
    {"temperature": 1e-5},
    {"temperature": 2e-5, "top_p": 0.9},
    {"top_k": 1},
    {"top_p": 1e-30},
    {"top_p": 1e-46},  # 0 in float32
    {"top_p": 5e-324},
    {"min_p": 1.0},
    {"temperature": 100.0, "top_k": 1, "top_p": 1e-40, "min_p": 1.0},
]


@pytest.mark.parametrize("mix", EXTREMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_parameters_that_leave_only_the_best_token_give_it(mix, scale):
    rng = np.random.default_rng(5)
    logits = np.stack([rng.permutation(300) for _ in range(40)]).astype(np.float32) * scale
    if mix.get("temperature", 1) < 1:
        logits = logits / np.float32(min(scale, 1))  # the best leads by 1 at least
    assert draw(logits, [mix] * 40).token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("mix", [{"min_p": 1e-46}, {"top_p": 1 - 1e-12}, {"top_k": 2**31 - 1}, {"temperature": 100.0}])
def test_parameters_that_round_to_off_change_nothing(mix):
    logits, *_ = random_rows(64, 300)
    base = {"temperature": mix.get("temperature", 1.0)}
    assert draw(logits, [mix] * 64).token_ids.tolist() == draw(logits, [base] * 64).token_ids.tolist()


@pytest.mark.parametrize("mix", MIXES)
def test_token_without_probability_is_never_drawn(mix):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(200, 150)).astype(np.float32)
    possible = rng.random((200, 150)) < 0.1
    possible[:, 149] = True
    logits[~possible] = -np.inf
    got = draw(logits, [mix] * 200)
    assert possible[np.arange(200), got.token_ids].all()


@pytest.mark.parametrize("vocab", [1024, 49152])
def test_token_without_weight_is_never_drawn_at_any_uniform(vocab):
    """Also where a cumulative sum's rounding moves between two tokens: uniforms around every step of the CDF."""
    rng = np.random.default_rng(0)
    inverse = jax.jit(_inverse_cdf)
    for _ in range(5):
        weights, kept = np.zeros(vocab, np.float32), np.sort(rng.choice(vocab, 100, replace=False))
        weights[kept] = np.exp(2 * rng.normal(size=100))
        cdf = np.cumsum(weights[kept].astype(np.float64)) / weights[kept].sum(dtype=np.float64)
        grid = np.clip(np.round(cdf * 2**23)[:, None] + np.arange(-3, 4), 0, 2**23 - 1).ravel()
        uniforms = (np.concatenate([[0, 2**23 - 1], grid]) * 2.0**-23).astype(np.float32)
        for chunk in np.array_split(uniforms, 12):
            chunk = np.resize(chunk, 64)
            tokens = np.asarray(inverse(np.broadcast_to(weights, (64, vocab)), chunk))
            assert (weights[tokens] > 0).all()
            index = np.minimum(np.searchsorted(cdf, chunk, side="right"), 99)
            assert (np.abs(np.searchsorted(kept, tokens) - index) <= 1).all()


def test_banned_tokens_are_drawn_by_nobody():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(100, 20)).astype(np.float32)
    banned = [rng.choice(20, row % 20, replace=False).tolist() for row in range(100)]
    for mix in ({}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}, {"temperature": 90.0}):
        got = draw(logits, [mix] * 100, banned=banned).token_ids
        assert not any(token in bans for token, bans in zip(got, banned)), mix
        if mix.get("temperature") == 0.0:
            masked = logits.copy()
            for row, bans in enumerate(banned):
                masked[row, bans] = -np.inf
            assert got.tolist() == masked.argmax(axis=1).tolist()


def test_filters_count_only_the_tokens_that_are_not_banned():
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (200, 1))
    got = draw(logits, [{"top_k": 2}] * 200, banned=[[0]] * 200).token_ids
    assert set(got) == {1, 2}


def test_ban_of_many_tokens_fits_and_a_ban_outside_the_vocabulary_changes_nothing():
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    best = list(range(VOCAB - 1, VOCAB - 1 - MAX_STOPS, -1))
    assert draw(logits, [{"temperature": 0.0}], banned=[best]).token_ids[0] == VOCAB - 1 - MAX_STOPS
    assert draw(logits, [{"temperature": 0.0}], banned=[[VOCAB, 2**31 - 1]]).token_ids[0] == VOCAB - 1


def test_logprobs_are_of_the_models_own_distribution_whatever_the_filters_and_bans():
    logits, params, seeds, positions, banned = random_rows(24, 300)
    got = draw(logits, params, seeds=seeds, positions=positions, banned=banned)
    exact = logits.astype(np.float64)
    exact = (
        exact - np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True)) - exact.max(1, keepdims=True)
    )
    rows = np.array([row for row, one in enumerate(params) if one["logprobs"]])
    of_rows, tokens = exact[rows], got.token_ids[rows]
    close = 2e-6 * np.abs(exact).max()
    np.testing.assert_allclose(got.logprobs[rows], of_rows[np.arange(len(rows)), tokens], atol=close)
    assert got.ranks[rows].tolist() == [1 + (row > row[token]).sum() for row, token in zip(of_rows, tokens)]
    best = np.argsort(-of_rows, axis=1)[:, :MAX_LOGPROBS]
    assert got.top_ids[rows].tolist() == best.tolist()
    np.testing.assert_allclose(got.top_logprobs[rows], np.take_along_axis(of_rows, best, 1), atol=close)
    others = np.setdiff1d(np.arange(24), rows)
    assert not got.logprobs[others].any() and not got.top_logprobs[others].any(), "nobody asked for them"


def test_tied_tokens_share_the_better_rank():
    logits = np.array([[1.0, 3.0, 3.0, 2.0]] * 4)
    banned = [[], [1], [1, 2], [1, 2, 3]]
    got = draw(logits, [{"temperature": 0.0, "logprobs": 1}] * 4, banned=banned)
    assert (got.token_ids.tolist(), got.ranks.tolist()) == ([1, 2, 3, 0], [1, 1, 3, 4])
    assert got.top_ids[0, :2].tolist() == [1, 2]


def test_step_in_which_nobody_wants_logprobs_has_none():
    logits, *_ = random_rows(4, 100)
    got = draw(logits, [{}, {"temperature": 0.0}, {}, {}])
    assert not got.logprobs.any() and not got.ranks.any() and not got.top_logprobs.any()


def test_host_row_holds_what_the_request_asked_for():
    batch = SamplingBatch.neutral(2)
    full = SamplingParams(temperature=0.5, top_p=0.25, min_p=0.125, top_k=9, logprobs=0)
    batch.set_row(1, full, (5 << 32) + 6, frozenset({8, 7}), 12)
    assert (batch.temperature[1], batch.top_p[1], batch.min_p[1], batch.top_k[1]) == (0.5, 0.25, 0.125, 9)
    assert batch.seeds[1].tolist() == [5, 6] and batch.wants_logprobs[1] and batch.min_length[1] == 12
    assert batch.stop_ids[1, :2].tolist() == [7, 8] and (batch.stop_ids[1, 2:] == -1).all()
    batch.set_row(0, SamplingParams(temperature=9e-6, top_k=-1), 0, frozenset(), 0)
    for name, array in vars(SamplingBatch.neutral(1)).items():
        assert (getattr(batch, name)[:1] == array).all(), name
