"""BeamSearch: which beams go on, which have ended, and when there is nothing left to win."""

import math

import pytest

from jpaged.beam_search import BeamSearch, Move
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import Sequence
from jpaged.sequence_group import SequenceGroup

EOS = 9


def make(width=2, max_tokens=10, **fields) -> BeamSearch:
    params = SamplingParams(n=width, temperature=0.0, use_beam_search=True, max_tokens=max_tokens, **fields)
    first = Sequence("a", [1, 2, 3], params, seed=0, max_tokens=max_tokens, eos_token_ids=frozenset({EOS}))
    search = BeamSearch(SequenceGroup(first, width).sequences)
    for seq in search.sequences:
        seq.num_computed_tokens = seq.num_tokens
    return search


def advance(search: BeamSearch, *candidates: dict[int, float]) -> list[Move] | None:
    """Reports a step, and does what the scheduler does."""
    for beam, best in enumerate(candidates):
        assert search.report(beam, list(best.items())) == (beam == len(candidates) - 1)
    moves = search.advance()
    before = [list(seq.token_ids) for seq in search.sequences]
    for move in moves or ():
        seq = search.sequences[move.beam]
        seq.token_ids = [*before[move.parent], move.token_id]
        seq.num_computed_tokens = seq.num_tokens
    return moves


def outputs(search: BeamSearch) -> list[list[int]]:
    return [hypothesis.token_ids for hypothesis in search.hypotheses]


def test_at_first_one_beam_counts_although_all_are_alike():
    search = make(3)
    best = {4: -0.1, 5: -0.5, 6: -2.0, 7: -3.0}
    assert advance(search, best, best, best) == [Move(0, 0, 4), Move(1, 0, 5), Move(2, 0, 6)]
    assert search.scores == [-0.1, -0.5, -2.0]


def test_a_beams_first_child_takes_its_place_and_the_others_those_of_beams_without_any():
    search = make(3)
    advance(search, *[{4: -0.1, 5: -0.2, 6: -0.3}] * 3)
    moves = advance(search, {1: -9.0, 2: -9.0}, {4: -0.1, 5: -0.2, 6: -9.0}, {7: -0.3})
    assert moves == [Move(0, 1, 5), Move(1, 1, 4), Move(2, 2, 7)]
    assert [seq.output_token_ids for seq in search.sequences] == [[5, 5], [5, 4], [6, 7]]


def test_an_ended_beam_is_kept_only_where_it_is_among_the_best_of_its_step():
    search = make(2)
    advance(search, *[{4: -0.1, 5: -0.2, EOS: -0.3}] * 2)
    assert not search.hypotheses, "two others were better"
    assert advance(search, {EOS: -0.1, 6: -0.5, 7: -0.6}, {6: -3.0, 7: -4.0, 8: -5.0}) == [Move(0, 0, 6), Move(1, 0, 7)]
    assert outputs(search) == [[4, EOS]] and search.hypotheses[0].score == pytest.approx(-0.2 / 2)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [
        (True, 1.0, True),
        (False, 1.0, True),
        ("never", 0.0, True),
        ("never", 1.0, False),  # in ten tokens it may be better
    ],
)
def test_what_runs_is_judged_by_the_best_that_it_may_become(early_stopping, length_penalty, is_over):
    search = make(2, early_stopping=early_stopping, length_penalty=length_penalty)
    advance(search, *[{4: -0.5, 5: -0.6, 6: -9.0}] * 2)
    moves = advance(search, {EOS: -0.8, 6: -1.2, 7: -2.0}, {EOS: -0.82, 6: -1.3, 7: -2.0})
    assert outputs(search) == [[4, EOS], [5, EOS]]
    assert (moves is None) == is_over


@pytest.mark.parametrize(("early_stopping", "is_over"), [(True, True), (False, False), ("never", False)])
def test_early_stopping_does_not_wait_for_what_is_better(early_stopping, is_over):
    search = make(2, early_stopping=early_stopping)
    advance(search, *[{4: -0.1, EOS: -0.2, 5: -3.0}] * 2)
    moves = advance(search, {6: -0.05, EOS: -0.1, 7: -9.0}, {6: -9.0, 7: -9.0, 8: -9.0})
    assert [hypothesis.token_ids for hypothesis in search.hypotheses] == [[4, EOS], [EOS]]
    assert (moves is None) == is_over


def test_running_better_by_its_length_goes_on_and_may_push_out_what_has_ended():
    search = make(2, early_stopping=False, max_tokens=4)
    advance(search, *[{4: -0.5, 5: -3.0, 6: -9.0}] * 2)
    advance(search, {EOS: -1.0, 6: -1.01, 7: -8.0}, {6: -9.0, 7: -9.0, 8: -9.0})
    advance(search, {6: -0.01, 7: -8.0, 8: -9.0}, {EOS: -0.5, 7: -9.0, 8: -9.0})
    assert advance(search, {6: -0.01, 7: -0.02, 8: -9.0}, {6: -9.0, 7: -9.0, 8: -9.0}) is None
    assert outputs(search) == [[4, 6, 6, 6], [4, 6, 6, 7]]
    assert [hypothesis.finish_reason for hypothesis in search.hypotheses] == ["length", "length"]


def test_a_beam_that_comes_again_after_preemption_is_waited_for():
    search = make(2)
    search.report(0, [(4, -0.1)])
    search.sequences[0].num_computed_tokens = 0  # preempted, with both
    assert not search.report(1, [(4, -0.1)])
    search.sequences[0].num_computed_tokens = 3
    assert search.report(0, [(4, -0.1)])


def test_a_stop_token_of_the_request_is_its_reason():
    search = make(1, stop_token_ids=(7,), max_tokens=5)
    assert advance(search, {7: -0.1, 5: -0.2, 6: -3.0}) is None
    (hypothesis,) = search.hypotheses
    assert (hypothesis.finish_reason, hypothesis.stop_reason, hypothesis.token_ids) == ("stop", 7, [7])


REFUSED = [
    ({"temperature": 1.0}, "temperature must be 0 with use_beam_search, got 1.0"),
    ({"best_of": 2}, "best_of is not possible with use_beam_search, got 2"),
    ({"logprobs": 0}, "logprobs is not possible with use_beam_search, got 0"),
    ({"min_tokens": 1}, "min_tokens is not possible with use_beam_search, got 1"),
    ({"stop": ["x"]}, r"stop is not possible with use_beam_search, got \('x',\)"),
    ({"early_stopping": "soon"}, "early_stopping must be true, false or 'never', got 'soon'"),
    ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
    ({"length_penalty": 10.5}, r"length_penalty must be in \[-10, 10\], got 10.5"),
    ({"length_penalty": -2000}, r"length_penalty must be in \[-10, 10\], got -2000"),
    ({"use_beam_search": False, "length_penalty": 2.0}, r"length_penalty \(2.0\) needs use_beam_search"),
    ({"use_beam_search": False, "early_stopping": True}, r"early_stopping \(True\) needs use_beam_search"),
]


@pytest.mark.parametrize(("fields", "complaint"), REFUSED)
def test_what_contradicts_a_search_is_refused_by_name(fields, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        SamplingParams(**{"temperature": 0.0, "use_beam_search": True} | fields)


@pytest.mark.parametrize("length_penalty", [-10, 10])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_lives_with_any_length_penalty_that_is_taken(length_penalty, early_stopping):
    """However long its outputs become."""
    search = make(1, max_tokens=2**20, length_penalty=length_penalty, early_stopping=early_stopping)
    (seq,) = search.sequences
    seq.token_ids += [5] * (2**20 - 3)
    for _ in range(3):
        seq.num_computed_tokens = seq.num_tokens
        advance(search, {7: -1e4, EOS: -2e4})
    (hypothesis,) = search.hypotheses
    assert math.isfinite(hypothesis.score) and hypothesis.score != 0
