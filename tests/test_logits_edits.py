"""Edited logits are what penalties, biases and bans say in float64; and tokens are counted as they are sampled."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.bad_words import bad_word_tokens
from jpaged.errors import NOT_FINITE, NOTHING_ALLOWED
from jpaged.logits_edits import EditLoad, LogitsEdits, count_tokens, edit_logits, load_edits
from jpaged.sampler import sample
from jpaged.sampling_batch import SamplingBatch
from jpaged.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS, SamplingParams

VOCAB, ROWS, SLOTS = 40, 24, 17
run_sample = jax.jit(functools.partial(sample, max_logprobs=3))


def reference(logits, params: SamplingParams, prompt, output, bad_words, banned=()) -> np.ndarray:
    """The edits of one row, one token at a time, in float64."""
    edited = np.asarray(logits, np.float64).copy()
    for token in range(len(edited)):
        x = edited[token] + params.logit_bias.get(token, 0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x = -np.inf
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        for *before, last in bad_words:
            if last == token and (not before or output[-len(before) :] == before):
                x = -np.inf
        edited[token] = -np.inf if token in banned else x
    return edited


def random_request(rng: random.Random):
    """(parameters, prompt, output, bad words): every parameter is on its own, off, or among others."""
    output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 3, 30]))]
    bad_words = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))] for _ in range(rng.choice([0, 3]))]
    bad_words += [output[-n:] + [rng.randrange(VOCAB)] for n in (1, 2, MAX_BAD_WORD_TOKENS - 1) if len(output) >= n]
    params = SamplingParams(
        presence_penalty=rng.choice([0, -2, 0.5, 2]),
        frequency_penalty=rng.choice([0, -2, 0.5, 2]),
        repetition_penalty=rng.choice([1, 0.5, 1.3, 100]),
        logit_bias={rng.randrange(VOCAB): rng.choice([-100, -1, 2.5, 100]) for _ in range(rng.choice([0, 1, 9]))},
        allowed_token_ids=rng.choice([None, None, [1, 5, 7, 8, 30], [rng.randrange(VOCAB)]]),
    )
    return params, [rng.randrange(VOCAB) for _ in range(rng.choice([1, 20]))], output, bad_words


def make_state(requests, slots) -> LogitsEdits:
    edits = LogitsEdits.neutral(SLOTS, VOCAB)
    for slot, request in zip(slots, requests, strict=True):
        edits.set_slot(slot, *request)
    return edits


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_edited", [1, 8, 11])
def test_edited_rows_are_those_of_the_float64_specification_and_others_are_untouched(seed, num_edited):
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(num_edited)]
    slots = rng.sample(range(1, SLOTS), num_edited)
    rows = rng.sample(range(ROWS), num_edited + 2)  # the last two have no slot, but tokens that may not end them
    batch = SamplingBatch.neutral(ROWS)
    batch.edit_slot[rows[:num_edited]] = slots
    batch.temperature[:] = numbers.choice([0, 0.5, 1, 2], ROWS)
    batch.stop_ids[:, :2] = numbers.integers(0, VOCAB, (ROWS, 2))
    must_go_on = np.isin(np.arange(ROWS), rows[-3:])
    logits = numbers.normal(size=(ROWS, VOCAB)).astype(np.float32) * 4
    temperature = np.where(batch.temperature > 0, batch.temperature, 1)[:, None]
    is_edited = np.isin(np.arange(ROWS), rows)
    state = make_state(requests, slots)
    got = np.asarray(jax.jit(edit_logits)(logits / temperature, state, batch, is_edited, must_go_on))

    expected = logits.astype(np.float64)
    nothing = SamplingParams(), [], [], []
    for row, request in zip(rows, [*requests, nothing, nothing], strict=True):
        expected[row] = reference(logits[row], *request, batch.stop_ids[row, :2] if must_go_on[row] else ())
    assert (np.isneginf(got) == np.isneginf(expected)).all() and np.isneginf(expected).any()
    np.testing.assert_allclose(got, expected / temperature, rtol=1e-5, atol=1e-4)
    assert (got[~is_edited] == (logits / temperature)[~is_edited]).all()


@pytest.mark.parametrize("seed", range(3))
def test_tokens_counted_one_by_one_leave_the_state_of_a_sequence_that_has_them_already(seed):
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(5)]
    slots = rng.sample(range(1, SLOTS), 5)
    begun = [(params, prompt, [], words) for params, prompt, _, words in requests]
    state = jax.tree.map(jnp.asarray, make_state(begun, slots))
    count = jax.jit(count_tokens)
    for step in range(max(len(output) for _, _, output, _ in requests)):
        going = [(slot, output[step]) for slot, (_, _, output, _) in zip(slots, requests) if step < len(output)]
        # beside them rows of nobody, and one that got an error in place of a token
        rows = [*going, (0, 3), (slots[0], NOT_FINITE)] + [(0, 0)] * (6 - len(going))
        state = count(state, *np.array(rows, np.int32).T)
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(make_state(requests, slots)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_load_replaces_one_slot_and_leaves_nothing_of_its_last_owner():
    rng = random.Random(1)
    old, new = [random_request(rng) for _ in range(3)], random_request(rng)
    state = jax.tree.map(jnp.asarray, make_state(old, [1, 2, 3]))
    packing = EditLoad.packing(VOCAB)
    buffer, load = packing.empty()
    load.slot[:] = 2
    load.edits.make_neutral()
    load.edits.set_slot(0, *new)
    state = jax.jit(lambda state, buffer: load_edits(state, packing.unpack(buffer)))(state, buffer)
    expected = make_state([old[0], new, old[2]], [1, 2, 3])
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


def draw(logits, edits=None, **fields):
    """Tokens of all rows in one program."""
    batch = SamplingBatch.neutral(ROWS)
    for name, value in fields.items():
        getattr(batch, name)[:] = value
    batch.seeds[:, 1] = np.arange(ROWS)
    edits = LogitsEdits.neutral(SLOTS, VOCAB) if edits is None else edits
    return run_sample(
        np.asarray(logits, np.float32), batch, edits, np.full(ROWS, 9, np.int32), np.full(ROWS, -1, np.int32)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_gets_an_error_and_its_neighbours_their_tokens(temperature):
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB))
    expected = np.asarray(draw(logits, temperature=temperature).token_ids)
    bad = {3: np.nan, 4: np.inf, 9: -np.inf}
    for row, value in bad.items():
        logits[row, 7] = value
    logits[9] = -np.inf
    got = np.asarray(draw(logits, temperature=temperature).token_ids)
    assert got[[3, 4, 9]].tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED]
    others = np.setdiff1d(np.arange(ROWS), list(bad))
    assert (got[others] == expected[others]).all() and (expected >= 0).all()


def test_a_request_that_bans_all_it_allows_gets_an_error():
    edits = make_state([(SamplingParams(allowed_token_ids=[5, 6]), [1], [], [[5]])], [1])
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB))
    assert (np.asarray(draw(logits, edits, edit_slot=1).token_ids) == 6).all()
    edits = make_state([(SamplingParams(allowed_token_ids=[5, 6]), [1], [], [[5], [6]])], [1])
    assert (np.asarray(draw(logits, edits, edit_slot=1).token_ids) == NOTHING_ALLOWED).all()


def test_logprobs_are_of_the_models_own_distribution_whatever_the_edits():
    request = SamplingParams(logit_bias={5: 100}, repetition_penalty=2), [7], [7, 8], []
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)
    got = draw(logits, make_state([request], [1]), edit_slot=1, wants_logprobs=1)
    assert (np.asarray(got.token_ids) == 5).all()
    own = np.asarray(jax.nn.log_softmax(logits, axis=1))
    np.testing.assert_allclose(got.logprobs, own[:, 5], rtol=1e-6)
    np.testing.assert_array_equal(got.top_ids[:, 0], logits.argmax(axis=1))


class Words:
    """A tokenizer that has a token for each word with a space before it, and one for each letter."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [99] if text == " cat" else list(text.encode())


def test_bad_words_are_banned_with_and_without_a_space_before_them():
    assert bad_word_tokens(["cat", " dog"], Words()) == [list(b"cat"), [99], list(b"dog")]  # " dog" ends in "dog"
    with pytest.raises(ValueError, match=f"which has 17 tokens; it must be 1 to {MAX_BAD_WORD_TOKENS}"):
        bad_word_tokens(["a" * 17], Words())


def test_as_many_bad_words_as_are_allowed_fit():
    words = [[i % VOCAB] * MAX_BAD_WORD_TOKENS for i in range(MAX_BAD_WORD_SEQUENCES)]
    edits = make_state([(SamplingParams(), [1], [], words)], [1])
    assert (edits.bad_words[1] >= 0).all()
