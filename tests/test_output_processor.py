"""Output: deltas add up to the text, a stop string never shows, and log-probs name the chosen token first."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_on_disk import smollm2

from jpaged.metrics import EngineMetrics
from jpaged.model_runner import StepResult
from jpaged.output_processor import OutputProcessor, RequestOutputBuilder
from jpaged.outputs import OutputDelta, TokenDelta
from jpaged.result_processor import token_entries
from jpaged.sampling_batch import Sampled
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import FinishReason

TOKENIZER = smollm2()
TEXT = "The answer is 42.\n\nQ: What is next? 😀 naïve"


class Reader:
    """A processor that is fed token by token as an engine would, and tells what it has asked the engine to stop."""

    def __init__(self, **params):
        self.params, self.metrics, self.stopped, self.now = SamplingParams(**params), EngineMetrics("tiny"), [], 10.0
        self.processor = OutputProcessor(
            "r", 2, self.params, TOKENIZER, self.metrics, self.stopped.append, arrival_time=9.0
        )

    def take(self, *token_ids, index=0, **more) -> list[OutputDelta]:
        self.now += 1.0
        return self.processor.process(
            TokenDelta("r", index, list(token_ids), self.now, first_scheduled_time=9.5, **more)
        )

    def take_all(self, ids, index=0, reason=FinishReason.LENGTH) -> list[OutputDelta]:
        """One by one; the last one ends the sample for that reason, wherever the reader has stopped listening."""
        reasons = [None] * (len(ids) - 1) + [reason]
        return [out for i, why in zip(ids, reasons) for out in self.take(i, index=index, finish_reason=why)]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def text_of(outputs: list[OutputDelta]) -> str:
    return "".join(output.text for output in outputs)


def test_deltas_add_up_to_the_text_of_the_tokens():
    ids = ids_of(TEXT)
    outputs = Reader().take_all(ids)
    assert text_of(outputs) == TEXT
    assert [output.token_ids for output in outputs] == [[token_id] for token_id in ids]
    assert [output.finish_reason for output in outputs] == [None] * (len(ids) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("include, shown", [(False, "The answer is 42."), (True, "The answer is 42.\n\nQ:")])
def test_stop_string_over_several_tokens_ends_the_request_once_and_never_shows_in_part(include, shown):
    ids = ids_of(TEXT)
    reader = Reader(stop=("\n\nQ:",), include_stop_str_in_output=include)
    outputs = reader.take_all(ids)
    assert len(ids_of("\n\nQ:")) > 1
    assert text_of(outputs) == shown
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, "\n\nQ:")
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert num_tokens == len(outputs) < len(ids), "what the engine said after it is surplus"
    assert reader.stopped == [0]
    counted = reader.metrics.snapshot()
    assert (
        counted["request_success{finished_reason=stop}"] == 1 and counted["request_generation_tokens_sum"] == num_tokens
    )


def test_stop_string_completed_by_the_last_allowed_token_is_the_reason():
    reader = Reader(stop=("two",))
    last = reader.take_all(ids_of("one two"))[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "two")
    assert reader.stopped == [], "the engine has ended it itself"


def test_head_of_a_stop_string_that_does_not_come_is_given_out_at_the_end():
    outputs = Reader(stop=("\n\nQ:",)).take_all(ids_of("wait.\n\n"))
    assert text_of(outputs) == "wait.\n\n" and outputs[-1].finish_reason == FinishReason.LENGTH


def test_unfinished_character_is_flushed_at_the_end():
    ids = ids_of("😀")
    assert len(ids) > 1
    assert text_of(Reader().take_all(ids[:1])) == "\ufffd"


def test_stop_strings_under_min_tokens_are_only_text():
    outputs = Reader(stop=("b",), min_tokens=4).take_all(ids_of("a b a b a b"))
    assert text_of(outputs) == "a b a " and len(outputs) == 4


def test_a_stop_string_that_begins_under_min_tokens_ends_the_text_where_it_is_complete():
    """The default model's own answer to "The capital of France is": the string is complete at the 8th token."""
    ids = ids_of(" Paris.\n\nThe answer is: Paris")
    assert ids_of(" Paris.\n\nThe answer is:") == ids[:8]
    outputs = Reader(stop=(" answer is:",), min_tokens=7).take_all(ids)
    assert text_of(outputs) == " Paris.\n\nThe" and len(outputs) == 8
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", " answer is:")


PIECES = st.sampled_from(ids_of("a") + ids_of("ab") + ids_of("b") + ids_of("\n") + ids_of("😀") + ids_of("é"))


def as_read_one_character_at_a_time(ids, stops, min_tokens, include):
    """The specification: (text, tokens, stop string) where the first of stops is complete that a token completes which is
    none of the first min_tokens - 1; of several completed at once the longest."""
    stream = TOKENIZER.stream(True, is_continuation=True)
    text = ""
    for number, token_id in enumerate(ids, start=1):
        for character in stream.push(token_id) + (stream.flush() if number == len(ids) else ""):
            text += character
            hits = [stop for stop in stops if text.endswith(stop)] if number >= min_tokens else []
            if hits:
                stop = max(hits, key=len)
                return text[: len(text) if include else len(text) - len(stop)], number, stop
    return text, len(ids), None


@settings(max_examples=600)
@given(
    st.lists(PIECES, min_size=1, max_size=14),
    st.lists(st.text("ab\n😀é", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.integers(0, 8),
    st.booleans(),
    st.data(),
)
def test_stop_strings_end_the_text_at_one_place_whatever_comes_at_a_time(ids, stops, min_tokens, include, data):
    """Tokens one by one, or several of a step that decoded on or verified a draft; cut up in any way; two samples."""
    expected = as_read_one_character_at_a_time(ids, stops, min_tokens, include)
    reader = Reader(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include, n=2, max_tokens=99)
    rest, outputs = list(ids), []
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        reason = "length" if size == len(rest) else None
        outputs += reader.take(*rest[:size], index=0, finish_reason=reason)
        reader.take(*rest[:size][::-1], index=1, finish_reason=reason)
        rest = rest[size:]
        assert expected[0].startswith(text_of(outputs)), "what has been shown is never taken back"
    got = text_of(outputs), sum(len(output.token_ids) for output in outputs), outputs[-1].stop_reason
    assert got == expected


def test_stop_token_that_is_special_is_not_shown_and_one_that_is_text_is():
    (eos,) = TOKENIZER.eos_token_ids
    (word,) = ids_of(" next")
    for token_id, shown in ((eos, ""), (word, " next")):
        (output,) = Reader().take(token_id, finish_reason="stop", stop_reason=token_id)
        assert (output.text, output.finish_reason, output.stop_reason) == (shown, FinishReason.STOP, token_id)


def test_given_up_request_gives_out_what_was_held_back_and_keeps_its_cached_tokens():
    ids, reader = ids_of("wait.\n\n"), Reader(stop=("\n\nQ:",))
    builder = RequestOutputBuilder("r", "prompt", [1, 2])
    for token_id in ids:
        for delta in reader.take(token_id, num_cached_tokens=1):
            output = builder.add(delta)
    assert output.outputs[0].text == "wait." and not output.finished
    for delta in reader.processor.end(FinishReason.ABORT):
        output = builder.add(delta)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("wait.\n\n", "abort", True)
    assert output.outputs[0].token_ids == ids and output.num_cached_tokens == 1


def test_a_failing_sample_keeps_the_tokens_that_it_had_even_after_a_stop_string():
    (output,) = Reader(stop=("two",)).take(*ids_of("one two three"), finish_reason="error", error="no luck")
    assert (output.text, output.finish_reason, output.error) == ("one two three", "error", "no luck")


@pytest.mark.parametrize(("min_tokens", "num_left"), [(0, 2), (3, 4)])
def test_several_tokens_end_at_the_one_that_completes_a_stop_string(min_tokens, num_left):
    """As if they had come one by one, though the sequence has ended at a later one meanwhile."""
    ids = ids_of("one two three two")
    entries = [[(token_id, -1.0, 1)] for token_id in ids]
    reader = Reader(stop=["two"], min_tokens=min_tokens, logprobs=0)
    (output,) = reader.take(*ids, logprobs=entries, finish_reason="length")
    assert (output.finish_reason, output.stop_reason) == ("stop", "two")
    assert output.text == "one two three two"[: 4 if num_left == 2 else 14]
    assert output.token_ids == ids[:num_left] and len(output.logprobs) == num_left


def test_the_best_samples_come_when_all_have_ended_ranked_by_what_is_left_of_them():
    """The sum is that of the tokens up to a stop string: what the engine computed after it does not count."""
    reader, ids = Reader(n=1, best_of=2, stop=["two"], max_tokens=9), ids_of("one two three")
    good, bad = ([[(token_id, logprob, 1)] for token_id in ids] for logprob in (-1.0, -1.5))
    assert reader.take(*ids, index=0, logprobs=[*good[:2], [(ids[2], -50.0, 9)]]) == [] and reader.stopped == [0]
    (best,) = reader.take(*ids[:1], index=1, logprobs=bad[:1]) + reader.take(
        *ids[1:], index=1, logprobs=bad[1:], finish_reason="length"
    )
    assert (best.index, best.text, best.cumulative_logprob) == (0, "one ", -2.0)
    assert best.num_dropped_tokens == 2 and best.logprobs is None


def test_times_and_gaps_of_a_request_are_counted_once():
    reader, ids = Reader(), ids_of("one two three")
    reader.take(*ids[:1])
    reader.take(*ids[1:], finish_reason="length")
    assert reader.processor.end(FinishReason.ABORT) == []
    counted = reader.metrics.snapshot()
    names = (
        "time_to_first_token",
        "request_queue_time",
        "request_prefill_time",
        "e2e_request_latency",
        "request_decode_time",
    )
    assert [counted[f"{name}_seconds_sum"] for name in names] == [2.0, 0.5, 1.5, 3.0, 1.0]
    assert [counted[f"{name}_seconds_count"] for name in names] == [1] * 5
    assert (counted["inter_token_latency_seconds_sum"], counted["inter_token_latency_seconds_count"]) == (1.0, 2)
    assert counted["request_time_per_output_token_seconds_sum"] == 0.5
    assert dataclasses.astuple(reader.processor.times) == (9.0, 9.5, 11.0, 12.0)


def test_tokens_that_come_all_at_once_have_no_time_between_them():
    reader = Reader()
    reader.take(*ids_of("one two three"), finish_reason="length")
    counted = reader.metrics.snapshot()
    names = ("request_time_per_output_token", "request_decode_time", "inter_token_latency", "e2e_request_latency")
    assert [counted[f"{name}_seconds_count"] for name in names] == [0, 0, 0, 1]


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


def named(num_top, token_id, step, row):
    (output,) = Reader(logprobs=num_top).take(token_id, logprobs=[token_entries(num_top, token_id, step, row)])
    return output.logprobs[0]


def test_logprobs_name_the_chosen_token_first_then_the_best_by_rank():
    step, exact = result(np.array([[0.0, 9.0, 1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 2.0, 8.0, 7.0, 0.0]]))
    for row, order in enumerate([[1, 5, 4, 3], [3, 4, 0, 2]]):
        chosen = order[1]
        for k in range(4):
            got = named(k, chosen, step, row)
            assert list(got) == [chosen, *(token for token in order[:k] if token != chosen)]
            for token, entry in got.items():
                assert entry.logprob == pytest.approx(exact[row, token])
                assert entry.rank == order.index(token) + 1
                assert entry.decoded_token == TOKENIZER.decoded_token(token)


def test_chosen_token_outside_the_best_is_one_entry_more():
    step, _ = result(np.array([[0.0, 9.0, 1.0, 2.0, 3.0]]))
    assert list(named(1, 4, step, 0)) == [4, 1]


def test_rank_of_a_chosen_token_that_ties_with_the_best_is_the_samplers():
    sampled = Sampled(*map(np.array, ([7], [-1.0], [1], [[3, 7]], [[-1.0, -1.0]])))
    got = named(2, 7, StepResult([7], sampled), 0)
    assert [(token, entry.rank) for token, entry in got.items()] == [(7, 1), (3, 1)]


def test_output_grows_to_the_sum_of_its_deltas():
    ids, reader = ids_of("one two three"), Reader(logprobs=0)
    step, exact = result(np.random.default_rng(0).normal(size=(len(ids), 9)))
    builder, total = RequestOutputBuilder("r", "prompt", [1, 2]), 0.0
    for row, (token_id, chosen) in enumerate(zip(ids, step.token_ids)):
        [(_, logprob, rank)] = token_entries(0, chosen, step, row)
        is_last = row == len(ids) - 1
        (delta,) = reader.take(
            token_id, logprobs=[[(token_id, logprob, rank)]], finish_reason="length" if is_last else None
        )
        total += exact[row, chosen]
        output = builder.add(delta)
        assert output.finished == is_last
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("one two three", ids, "length")
    assert completion.cumulative_logprob == pytest.approx(total) and len(completion.logprobs) == len(ids)
    assert (output.prompt, output.prompt_token_ids) == ("prompt", [1, 2])


def test_output_without_logprobs_has_neither_list_nor_sum():
    builder = RequestOutputBuilder("r", None, [1])
    completion = [builder.add(delta) for delta in Reader().take_all(ids_of("one"))][-1].outputs[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None


def test_request_that_the_engine_gave_up_says_why():
    builder = RequestOutputBuilder("r", None, [1])
    output = builder.add(OutputDelta("r", "", [], finish_reason="error", error="out of memory"))
    assert output.finished and (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "out of memory")
