"""Output: deltas add up to the text, a stop string never shows, and log-probs name the chosen token first."""

import numpy as np
import pytest
from tokenizers_on_disk import smollm2

from jpaged.model_runner import StepResult
from jpaged.output_processor import RequestOutputBuilder, SampleState, token_logprobs
from jpaged.outputs import OutputDelta
from jpaged.sampling_batch import Sampled
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason, Sequence, SequenceStatus

TOKENIZER = smollm2()
TEXT = "The answer is 42.\n\nQ: What is next? 😀 naïve"


def make(text=TEXT, *, finishes=True, **params):
    """A sample, and its tokens: those of text, the last of which ends it by length where finishes."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    limit = len(ids) if finishes else len(ids) + 1
    seq = Sequence("r", [1, 2], SamplingParams(max_tokens=limit, **params), seed=0, max_tokens=limit)
    return SampleState(seq, TOKENIZER), ids


def advance(state, token_id, logprobs=None):
    """What the engine does with a sampled token."""
    reason = state.seq.append(token_id)
    if reason is not None:
        state.seq.finish_reason, state.seq.status = reason, SequenceStatus.FINISHED
    return state.advance([token_id], logprobs and [logprobs])


def advance_all(state, ids):
    deltas = []
    for token_id in ids:
        deltas.append(advance(state, token_id))
        if deltas[-1].finish_reason:
            break
    return deltas


def test_deltas_add_up_to_the_text_of_the_tokens():
    state, ids = make()
    deltas = advance_all(state, ids)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in ids]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(ids) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("include, shown", [(False, "The answer is 42."), (True, "The answer is 42.\n\nQ:")])
def test_stop_string_over_several_tokens_ends_the_request_and_never_shows_in_part(include, shown):
    state, ids = make(stop=("\n\nQ:",), include_stop_str_in_output=include)
    deltas = advance_all(state, ids)
    assert len(TOKENIZER.encode("\n\nQ:", add_special_tokens=False)) > 1
    assert "".join(delta.text for delta in deltas) == shown
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "\n\nQ:")
    assert len(deltas) < len(ids) and not state.seq.is_finished  # the caller ends it


def test_stop_string_completed_by_the_last_allowed_token_is_the_reason():
    state, ids = make("one two", stop=("two",))
    last = advance_all(state, ids)[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "two")


def test_head_of_a_stop_string_that_does_not_come_is_given_out_at_the_end():
    state, ids = make("wait.\n\n", stop=("\n\nQ:",))
    deltas = advance_all(state, ids)
    assert "".join(delta.text for delta in deltas) == "wait.\n\n" and deltas[-1].finish_reason == FinishReason.LENGTH


def test_unfinished_character_is_flushed_at_the_end():
    ids = TOKENIZER.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    seq = Sequence("r", [1], SamplingParams(), seed=0, max_tokens=1)
    assert advance(SampleState(seq, TOKENIZER), ids[0]).text == "\ufffd"


def test_stop_strings_under_min_tokens_are_only_text():
    state, ids = make("a b a b a b", stop=("b",), min_tokens=4)
    text = "".join(delta.text for delta in advance_all(state, ids))
    assert text == "a b a "
    assert state.seq.num_output_tokens == 4


def test_stop_token_that_is_special_is_not_shown_and_one_that_is_text_is():
    (eos,) = TOKENIZER.eos_token_ids
    (word,) = TOKENIZER.encode(" next", add_special_tokens=False)
    for token_id, shown in ((eos, ""), (word, " next")):
        seq = Sequence("r", [1], SamplingParams(stop_token_ids=(token_id,)), seed=0, max_tokens=9)
        delta = advance(SampleState(seq, TOKENIZER), token_id)
        assert (delta.text, delta.finish_reason, delta.stop_reason) == (shown, FinishReason.STOP, token_id)


def test_given_up_request_gives_out_what_was_held_back_and_keeps_its_cached_tokens():
    state, ids = make("wait.\n\n", finishes=False, stop=("\n\nQ:",))
    state.seq.num_cached_tokens = 1
    builder = RequestOutputBuilder("r", "prompt", [1, 2])
    for delta in advance_all(state, ids):
        output = builder.add(delta)
    assert output.outputs[0].text == "wait." and not output.finished
    output = builder.add(state.give_up(FinishReason.ABORT))
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("wait.\n\n", "abort", True)
    assert output.outputs[0].token_ids == ids and output.num_cached_tokens == 1


def result(logits):
    """A step's log-probs as numpy, best first, with greedy's second choice drawn."""
    logprobs = np.asarray(logits) - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, axis=-1)
    chosen = order[:, 1]
    rows = np.arange(len(chosen))
    return StepResult(
        chosen.tolist(),
        Sampled(
            chosen,
            logprobs[rows, chosen],
            np.full(len(rows), 2),
            order[:, :4],
            np.take_along_axis(logprobs, order[:, :4], 1),
        ),
    ), logprobs


def test_logprobs_name_the_chosen_token_first_then_the_best_by_rank():
    step, exact = result(np.array([[0.0, 9.0, 1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 2.0, 8.0, 7.0, 0.0]]))
    for row, order in enumerate([[1, 5, 4, 3], [3, 4, 0, 2]]):
        chosen = order[1]
        for k in range(4):
            got = token_logprobs(k, chosen, step, row, TOKENIZER)
            assert list(got) == [chosen, *(token for token in order[:k] if token != chosen)]
            for token, entry in got.items():
                assert entry.logprob == pytest.approx(exact[row, token])
                assert entry.rank == order.index(token) + 1
                assert entry.decoded_token == TOKENIZER.decoded_token(token)


def test_chosen_token_outside_the_best_is_one_entry_more():
    step, _ = result(np.array([[0.0, 9.0, 1.0, 2.0, 3.0]]))
    assert list(token_logprobs(1, 4, step, 0, TOKENIZER)) == [4, 1]


def test_request_that_wants_no_logprobs_has_none_whatever_the_step_has():
    assert token_logprobs(None, 4, result(np.eye(5))[0], 0, TOKENIZER) is None


def test_output_grows_to_the_sum_of_its_deltas():
    state, ids = make("one two three", logprobs=0)
    step, exact = result(np.random.default_rng(0).normal(size=(len(ids), 9)))
    builder, total = RequestOutputBuilder("r", "prompt", [1, 2]), 0.0
    for row, (token_id, chosen) in enumerate(zip(ids, step.token_ids)):
        entry = token_logprobs(state.seq.params.logprobs, chosen, step, row, TOKENIZER)
        delta = advance(state, token_id, {token_id: entry[chosen]})
        total += exact[row, chosen]
        output = builder.add(delta)
        assert output.finished == (row == len(ids) - 1)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("one two three", ids, "length")
    assert completion.cumulative_logprob == pytest.approx(total) and len(completion.logprobs) == len(ids)
    assert (output.prompt, output.prompt_token_ids) == ("prompt", [1, 2])


def test_output_without_logprobs_has_neither_list_nor_sum():
    state, ids = make("one")
    builder = RequestOutputBuilder("r", None, [1])
    completion = [builder.add(delta) for delta in advance_all(state, ids)][-1].outputs[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None


def test_request_that_the_engine_gave_up_says_why():
    builder = RequestOutputBuilder("r", None, [1])
    output = builder.add(OutputDelta("r", "", [], finish_reason="error", error="out of memory"))
    assert output.finished and (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "out of memory")


def test_rank_of_a_chosen_token_that_ties_with_the_best_is_the_samplers():
    sampled = Sampled(*map(np.array, ([7], [-1.0], [1], [[3, 7]], [[-1.0, -1.0]])))
    got = token_logprobs(2, 7, StepResult([7], sampled), 0, TOKENIZER)
    assert [(token, entry.rank) for token, entry in got.items()] == [(7, 1), (3, 1)]


@pytest.mark.parametrize(("min_tokens", "num_left"), [(0, 2), (3, 4)])
def test_several_tokens_end_at_the_one_that_completes_a_stop_string(min_tokens, num_left):
    """As if they had come one by one, though the sequence has ended at a later one meanwhile."""
    state, ids = make("one two three two", stop=["two"], min_tokens=min_tokens)
    for token_id in ids:
        state.seq.append(token_id)
    state.seq.finish_reason, state.seq.status = "length", SequenceStatus.FINISHED
    delta = state.advance(ids, [{token_id: None} for token_id in ids])
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "two")
    assert delta.text == "one two three two"[: 4 if num_left == 2 else 14]
    assert delta.token_ids == state.seq.output_token_ids == TOKENIZER.encode("one two three two")[:num_left]
    assert len(delta.logprobs) == num_left
