"""Buckets: every step has a program that holds it, and wastes at most half."""

import pytest

from jpaged.buckets import Buckets, bucket_ladder, round_up

LARGEST = [2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 512, 513, 2048, 8191, 8192]
SHAPES = [
    (2, 1),
    (2, 2),
    (3, 3),
    (16, 16),
    (100, 7),
    (512, 1),
    (512, 256),
    (512, 32),
    (700, 63),
    (700, 65),
    (2048, 256),
    (8192, 1024),
]


@pytest.mark.parametrize("largest", LARGEST)
def test_ladder_climbs_from_2_to_exactly_the_budget_in_steps_of_at_most_a_half(largest):
    ladder = bucket_ladder(largest)
    assert (ladder[0], ladder[-1]) == (2, largest)
    assert all(a < b <= 1.5 * a for a, b in zip(ladder, ladder[1:]))


def test_ladder_is_not_of_powers_of_two():
    assert bucket_ladder(64) == [2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64]


def test_rounding_up_takes_the_smallest_bucket_that_holds_the_size():
    ladder = bucket_ladder(100)
    assert [round_up(size, ladder) for size in range(1, 101)] == [
        min(b for b in ladder if b >= size) for size in range(1, 101)
    ]


def test_size_over_the_budget_is_our_error():
    with pytest.raises(AssertionError, match="101 is over the largest bucket, 100"):
        round_up(101, bucket_ladder(100))


@pytest.mark.parametrize("max_tokens, max_seqs", SHAPES)
def test_programs_are_distinct_and_those_of_the_two_ladders(max_tokens, max_seqs):
    buckets = Buckets(max_tokens, max_seqs)
    programs = buckets.all()
    assert len(set(programs)) == len(programs)
    assert set(programs) == {(t, r) for t in bucket_ladder(max_tokens) for r in buckets.rows(t)}
    assert all(1 <= r <= t for t, r in programs)


@pytest.mark.parametrize("max_tokens, max_seqs", SHAPES)
def test_every_step_that_the_scheduler_can_make_fits_the_smallest_program_there_is(max_tokens, max_seqs):
    buckets = Buckets(max_tokens, max_seqs)
    programs = buckets.all()
    for num_tokens in {*range(1, min(max_tokens, 300) + 1), *bucket_ladder(max_tokens)}:
        for num_rows in {0, 1, 2, 31, 32, 33, 127, 128, 129, min(num_tokens, max_seqs)}:
            if num_rows > min(num_tokens, max_seqs):
                continue
            tokens, rows = buckets.choose(num_tokens, num_rows)
            assert tokens == min(t for t, _ in programs if t >= num_tokens)
            assert rows == min(r for t, r in programs if t == tokens and r >= num_rows)


def test_decodes_of_all_sequences_and_the_full_prompt_step_come_first_in_warm_up():
    buckets = Buckets(512, 256)
    programs = buckets.all()
    worth_most = [(t, min(t, 256)) for t in buckets.tokens] + [(512, r) for r in buckets.rows(512)]
    assert set(programs[: len(set(worth_most))]) == set(worth_most)


def test_default_configuration_needs_few_programs():
    assert len(Buckets(512, 256).all()) <= 33


def test_drafts_add_rows_of_logits_and_steps_without_them_pay_for_none():
    buckets = Buckets(64, 8, (4, 8, 16, 64), max_num_rows=40)
    assert [buckets.rows(t) for t in (4, 8, 16, 64)] == [[4], [8], [8, 16], [8, 40]]
    assert buckets.choose(60, 8) == (64, 8) and buckets.choose(60, 9) == (64, 40) and buckets.max_rows == 40
    assert Buckets(512, 256, max_num_rows=512).rows(512) == [32, 64, 128, 256, 512]
