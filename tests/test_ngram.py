"""The index of n-grams proposes what a scan over all tokens would."""

from hypothesis import given
from hypothesis import strategies as st

from jpaged.ngram import NgramIndex


def scan(token_ids: list[int], num_tokens: int, min_length: int, max_length: int) -> list[int]:
    """The definition, read out: longest n-gram first, its last place first, then token by token."""
    for n in range(max_length, min_length - 1, -1):
        for place in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[place - n : place] == token_ids[len(token_ids) - n :]:
                copied = list(token_ids)
                for i in range(num_tokens):
                    copied.append(copied[place + i])
                return copied[len(token_ids) :]
    return []


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 20), max_size=20),
    num_tokens=st.integers(1, 9),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_it_proposes_what_a_scan_does_however_the_tokens_grow(token_ids, sizes, num_tokens, lengths):
    index = NgramIndex(*lengths)
    end = 0
    for size in [*sizes, len(token_ids)]:
        end = min(end + size, len(token_ids))
        so_far = token_ids[:end]
        assert index.propose(so_far, num_tokens) == scan(so_far, num_tokens, *lengths)


def test_the_longest_n_gram_wins_and_then_its_last_place():
    index = NgramIndex(1, 3)
    #  1 2 3 -> 7 although 2 3 -> 8 and 3 -> 9 came later; of the two places of 1 2 3 the later one
    assert index.propose([1, 2, 3, 6, 1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3], 1) == [7]


def test_nothing_repeats_nothing_is_proposed():
    index = NgramIndex(2, 4)
    assert [index.propose(list(range(n)), 4) for n in range(1, 50)] == [[]] * 49


def test_what_repeats_goes_on_repeating_past_its_end():
    assert NgramIndex(2, 4).propose([9, 1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert NgramIndex(2, 4).propose([5, 5, 5], 4) == [5, 5, 5, 5]
