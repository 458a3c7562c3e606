"""Sequence: tokens are appended until one of them ends the request."""

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason, Sequence, SequenceStatus


def make(prompt=(1, 2, 3), *, max_tokens=4, eos=frozenset(), seed=0, **params):
    return Sequence("a", list(prompt), SamplingParams(**params), seed=seed, max_tokens=max_tokens, eos_token_ids=eos)


def append_all(seq, tokens):
    return [seq.append(token) for token in tokens]


def test_new_sequence_waits_with_nothing_computed():
    seq = make()
    assert (seq.status, seq.num_tokens, seq.num_output_tokens, seq.output_token_ids) == (
        SequenceStatus.WAITING,
        3,
        0,
        [],
    )
    assert (seq.num_computed_tokens, len(seq.block_table), seq.row, seq.is_finished) == (0, 0, None, False)


def test_sequence_does_not_share_its_token_list_with_the_caller():
    prompt = [1, 2, 3]
    make(prompt).append(9)
    assert prompt == [1, 2, 3]


def test_max_tokens_ends_exactly_at_the_last_token():
    seq = make(max_tokens=3)
    assert append_all(seq, [7, 8, 9]) == [None, None, FinishReason.LENGTH]
    assert (seq.output_token_ids, seq.stop_reason) == ([7, 8, 9], None)


def test_end_of_text_stops_without_a_stop_reason_of_its_own():
    seq = make(eos=frozenset({5}))
    assert append_all(seq, [7, 5]) == [None, FinishReason.STOP]
    assert seq.stop_reason is None


def test_stop_token_of_the_request_is_the_stop_reason_even_where_it_is_the_end_of_text():
    for eos in (frozenset(), frozenset({5})):
        seq = make(eos=eos, stop_token_ids=(5, 6))
        assert append_all(seq, [7, 5]) == [None, FinishReason.STOP]
        assert seq.stop_reason == 5


def test_stop_token_at_the_length_limit_counts_as_a_stop():
    assert append_all(make(max_tokens=2, eos=frozenset({5})), [7, 5]) == [None, FinishReason.STOP]


def test_ignore_eos_ignores_the_end_of_text_but_not_the_stop_tokens():
    seq = make(eos=frozenset({5}), ignore_eos=True, stop_token_ids=(6,))
    assert append_all(seq, [5, 6]) == [None, FinishReason.STOP]


def test_stop_tokens_under_min_tokens_do_not_stop():
    seq = make(eos=frozenset({5}), min_tokens=3, max_tokens=4)
    assert append_all(seq, [5, 5, 5]) == [None, None, FinishReason.STOP]


@pytest.mark.parametrize(
    "seed", [-1, -(2**63), 2**64 - 1, np.int64(5), np.int64(-1), np.int32(7), np.uint64(2**64 - 1)]
)
def test_any_seed_of_64_bits_becomes_an_unsigned_one(seed):
    seq = make(seed=SamplingParams(seed=seed).seed)
    assert seq.seed == int(seed) % 2**64 and isinstance(seq.seed, int)
