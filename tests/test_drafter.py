"""A drafter drafts as much as has been worth it lately."""

import random

import pytest

from jpaged.drafter import MAX_PAUSE, Drafter
from jpaged.speculative_config import SpeculativeConfig

CONFIG = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)


def generate(drafter: Drafter, next_token, num_tokens: int, prompt=()) -> tuple[list[int], int, int]:
    """Decodes num_tokens tokens, each next_token(index), verifying all drafts; (lengths of them, steps, accepted)."""
    tokens, lengths, num_steps, num_accepted = list(prompt) or [0], [], 0, 0
    end = len(tokens) + num_tokens
    while len(tokens) < end:
        draft = drafter.propose(tokens, 0, end - len(tokens) - 1)
        draws = [next_token(len(tokens) + i) for i in range(len(draft) + 1)]
        accepted = next((i for i, (a, b) in enumerate(zip(draft, draws)) if a != b), len(draft))
        tokens += draws[: accepted + 1]
        if draft:
            drafter.take_result(len(draft), accepted, len(tokens))
        lengths.append(len(draft))
        num_steps += 1
        num_accepted += accepted
    return lengths, num_steps, num_accepted


def test_what_repeats_is_drafted_whole_and_needs_a_fifth_of_the_steps():
    lengths, num_steps, num_accepted = generate(Drafter(CONFIG), lambda i: i % 7, 1000, prompt=range(7))
    assert num_accepted + num_steps == 1000 and num_steps <= 1000 / 5 + 8
    assert set(lengths[10:-1]) == {4}


def test_where_nothing_repeats_nothing_is_drafted():
    lengths, num_steps, _ = generate(Drafter(CONFIG), lambda i: i, 1000)
    assert sum(lengths) == 0 and num_steps == 1000


def test_where_matches_always_mislead_few_tokens_are_drafted():
    """Pairs repeat all the time, and what follows is random."""
    rng = random.Random(0)
    lengths, num_steps, num_accepted = generate(Drafter(CONFIG), lambda i: rng.randrange(16), 2000)
    assert num_accepted < 0.1 * num_steps
    assert 4 < sum(lengths) <= 0.08 * num_steps


def test_an_adversary_costs_a_token_in_max_pause():
    """The draft is always there and always wrong."""
    drafter, tokens = Drafter(CONFIG), [1, 1, 1]
    lengths = []
    for _ in range(3000):
        draft = drafter.propose(tokens, 0, 99)
        lengths.append(len(draft))
        tokens.append(1)
        if draft:
            drafter.take_result(len(draft), 0, len(tokens))
    assert lengths[0] == 4 and set(lengths[1:]) == {0, 1}
    assert sum(lengths) <= 4 + 6 + 3000 / MAX_PAUSE


def test_after_a_rest_one_success_brings_the_drafts_back():
    drafter = Drafter(CONFIG)
    tokens = [1, 1, 1]
    while len(tokens) < 500:
        draft = drafter.propose(tokens, 0, 99)
        tokens.append(1)
        if draft:
            drafter.take_result(len(draft), 0, len(tokens))
    lengths, *_ = generate(drafter, lambda i: 1, 200, prompt=tokens)
    tried = [length for length in lengths if length]
    assert lengths.index(1) <= MAX_PAUSE
    assert tried[0] == 1 and tried[1] == 2 and set(tried[4:-1]) == {4}


def test_tokens_that_nobody_has_seen_yet_are_guessed_and_left_out():
    drafter = Drafter(CONFIG)
    tokens = [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert drafter.propose(tokens, 0, 99) == [3, 4, 5, 6]
    assert drafter.propose(tokens, 1, 99) == [4, 5, 6, 0]
    assert drafter.propose(tokens, 1, 2) == [4, 5]


@pytest.mark.parametrize("limit", [0, -1])
def test_no_room_no_draft(limit):
    assert Drafter(CONFIG).propose([1, 1, 1], 0, limit) == []
