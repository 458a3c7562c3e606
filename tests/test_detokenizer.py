"""Streaming: the pieces join to the whole whatever the tokens, and a stop string never shows, whatever the cuts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_on_disk import smollm2, tiny_sentencepiece, vocabulary

from jpaged.detokenizer import StopStringChecker

EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈😀"


def stream(tokenizer, ids, **options):
    detokenizer = tokenizer.stream(**options)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("make", [smollm2, tiny_sentencepiece, lambda: vocabulary("llama-spm")])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_for_any_ids(make, data):
    tokenizer = make()
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    # half of all draws from the bytes and special tokens at the start of a vocabulary: broken characters, and skips
    ids = data.draw(st.lists(any_id | st.integers(0, 260), max_size=40))
    for skip in (True, False):
        for is_continuation in (True, False):
            options = {"skip_special_tokens": skip, "is_continuation": is_continuation}
            assert "".join(stream(tokenizer, ids, **options)) == tokenizer.decode(ids, **options)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_byte_level_decode_is_that_of_the_tokenizers_library_for_any_ids(ids, skip):
    tokenizer = smollm2()
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_sentencepiece_decode_is_that_of_the_tokenizers_library_for_any_text(text):
    tokenizer = tiny_sentencepiece()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [smollm2, tiny_sentencepiece])
def test_unfinished_character_is_held_back_until_it_is_whole(make):
    tokenizer = make()
    pieces = stream(tokenizer, tokenizer.encode(EMOJI, add_special_tokens=False))
    assert "".join(pieces) == EMOJI
    assert "" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_character_that_never_ends_is_flushed_as_a_replacement():
    tokenizer = smollm2()
    ids = tokenizer.encode("😀")
    pieces = stream(tokenizer, ids[:-1])
    assert set(pieces[:-1]) == {""} and pieces[-1] == "\ufffd"


def first_completed(text, stops, include):
    """The specification: read a character at a time; stop as soon as the text ends in a stop string, the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


few_letters = st.text("ab\n", min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.text("ab\n", max_size=4), max_size=12), st.lists(few_letters, max_size=4), st.booleans())
def test_stop_strings_cut_the_same_place_however_the_text_is_cut_up(chunks, stops, include):
    checker = StopStringChecker(tuple(stops), include_stop_str_in_output=include)
    shown = ""
    expected, stop = first_completed("".join(chunks), stops, include)
    for chunk in chunks:
        shown += checker.push(chunk)
        assert expected.startswith(shown)  # what has been shown is never taken back
    assert (shown + checker.flush(), checker.stop_string) == (expected, stop)


def test_only_what_may_begin_a_stop_string_is_held_back():
    checker = StopStringChecker(("\n\nQ:",))
    assert [checker.push(text) for text in ("42", ".\n", "\nA", "\n\nQ", " no", "\n\n", "Q: next", "more")] == [
        "42", ".", "\n\nA", "", "\n\nQ no", "", "", ""
    ]  # fmt: skip
    assert (checker.stop_string, checker.flush()) == ("\n\nQ:", "")


def test_text_under_min_tokens_passes_without_stopping():
    checker = StopStringChecker(("b",))
    assert checker.push("abc", may_stop=False) == "abc"
    assert (checker.push("xby"), checker.stop_string) == ("x", "b")
