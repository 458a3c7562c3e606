"""SamplingParams: what cannot be sampled is refused in one line that names the field, the value and the limit."""

import dataclasses
import math

import numpy as np
import pytest

from jpaged.sampling_params import MAX_SAMPLES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

REFUSED = [
    ("temperature", -0.1, "in [0, 100], got -0.1"),
    ("temperature", 100.5, "in [0, 100], got 100.5"),
    ("temperature", math.nan, "a finite number, got nan"),
    ("temperature", math.inf, "a finite number, got inf"),
    ("temperature", "0.5", "a finite number, got '0.5'"),
    ("temperature", None, "a finite number, got None"),
    ("temperature", True, "a finite number, got True"),
    ("top_p", 0.0, "in (0, 1], got 0.0"),
    ("top_p", -0.5, "in (0, 1], got -0.5"),
    ("top_p", 1.01, "in (0, 1], got 1.01"),
    ("top_p", math.nan, "a finite number, got nan"),
    ("min_p", -0.01, "in [0, 1], got -0.01"),
    ("min_p", 1.5, "in [0, 1], got 1.5"),
    ("min_p", math.nan, "a finite number, got nan"),
    ("top_k", -2, "-1 or 0 (off) or positive, got -2"),
    ("top_k", 2**31, "under 2**31, got 2147483648"),
    ("top_k", 2.0, "an integer, got 2.0"),
    ("top_k", None, "an integer, got None"),
    ("seed", 2**64, f"64 bits, got {2**64}"),
    ("seed", -(2**63) - 1, f"64 bits, got {-(2**63) - 1}"),
    ("seed", 1.5, "an integer, got 1.5"),
    ("seed", True, "an integer, got True"),
    ("max_tokens", 0, "at least 1, or 0 with prompt_logprobs, got 0"),
    ("max_tokens", -3, "at least 1, or 0 with prompt_logprobs, got -3"),
    ("max_tokens", "16", "an integer, got '16'"),
    ("min_tokens", -1, "not be negative, got -1"),
    ("min_tokens", 17, "(17) must not be over max_tokens (16)"),
    ("min_tokens", None, "an integer, got None"),
    ("logprobs", -1, "not be negative, got -1"),
    ("logprobs", True, "an integer, got True"),
    ("n", 0, f"in [1, {MAX_SAMPLES}], got 0"),
    ("n", MAX_SAMPLES + 1, f"in [1, {MAX_SAMPLES}], got {MAX_SAMPLES + 1}"),
    ("n", None, "an integer, got None"),
    ("n", 2.0, "an integer, got 2.0"),
    ("best_of", 0, f"in [n, {MAX_SAMPLES}] with n = 1, got 0"),
    ("best_of", True, "an integer, got True"),
    ("stop", "", "non-empty strings, got ['']"),
    ("stop", ["a", ""], "non-empty strings, got ['a', '']"),
    ("stop", [1], "non-empty strings, got [1]"),
    ("stop", 5, "got 5"),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), f"at most {MAX_STOP_STRINGS} strings, got {MAX_STOP_STRINGS + 1}"),
    ("stop_token_ids", [-1], "token ids, got -1"),
    ("stop_token_ids", ["a"], "token ids, got 'a'"),
    ("stop_token_ids", [True], "token ids, got True"),
    ("stop_token_ids", 7, "got 7"),
    ("presence_penalty", -2.01, "in [-2, 2], got -2.01"),
    ("presence_penalty", None, "a finite number, got None"),
    ("frequency_penalty", math.inf, "a finite number, got inf"),
    ("repetition_penalty", 0.0, "in [0.01, 100], got 0.0"),
    ("repetition_penalty", 101, "in [0.01, 100], got 101"),
    ("repetition_penalty", -1.0, "in [0.01, 100], got -1.0"),
    ("logit_bias", [1], "map token ids to numbers, got [1]"),
    ("logit_bias", {-1: 1}, "token ids as keys, got -1"),
    ("logit_bias", {True: 1}, "token ids as keys, got True"),
    ("logit_bias", {1.0: 1}, "token ids as keys, got 1.0"),
    ("logit_bias", {"1e3": 1}, "token ids as keys, got '1e3'"),
    ("logit_bias", {1: "2"}, "numbers in [-100, 100], got '2' for token 1"),
    ("logit_bias", {1: -100.5}, "numbers in [-100, 100], got -100.5 for token 1"),
    ("logit_bias", {1: 2, "1": 2}, "names token 1 twice"),
    ("logit_bias", dict.fromkeys(range(301), 1), "at most 300 tokens, got 301"),
    ("allowed_token_ids", [], "not be empty"),
    ("allowed_token_ids", "12", "a list, got '12'"),
    ("allowed_token_ids", [3, 1.5], "token ids, got 1.5"),
    ("bad_words", [""], "non-empty strings, got ['']"),
    ("bad_words", [5], "non-empty strings, got [5]"),
    ("bad_words", ["x"] * 129, "at most 128 strings, got 129"),
    ("logits_processors", [5], "functions, got [5]"),
    ("logits_processors", max, "a list, got <built-in function max>"),
    ("prompt_logprobs", -1, "not be negative, got -1"),
    ("prompt_logprobs", 1.5, "an integer, got 1.5"),
    ("cache_salt", 7, "a string, got 7"),
    ("ignore_eos", "false", "true or false, got 'false'"),
    ("include_stop_str_in_output", 1, "true or false, got 1"),
    ("skip_special_tokens", None, "true or false, got None"),
    ("use_beam_search", "no", "true or false, got 'no'"),
    ("priority", 1.0, "an integer, got 1.0"),
    ("priority", None, "an integer, got None"),
    ("priority", 2**63, f"64 bits, got {2**63}"),
    ("cache_salt", ["a"], "a string, got ['a']"),
    ("cache_salt", "", "1 to 256 characters, got 0"),
    ("cache_salt", "x" * 257, "1 to 256 characters, got 257"),
    (
        "stop_token_ids",
        range(MAX_STOP_TOKEN_IDS + 1),
        f"at most {MAX_STOP_TOKEN_IDS} ids, got {MAX_STOP_TOKEN_IDS + 1}",
    ),
]


@pytest.mark.parametrize("field, value, complaint", REFUSED)
def test_bad_value_is_refused_by_name_with_the_value_and_the_limit(field, value, complaint):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(field) and complaint in message and "\n" not in message


ACCEPTED = [
    {"temperature": 0}, {"temperature": 100}, {"temperature": np.float32(0.5)}, {"top_p": 1}, {"top_p": 5e-324},
    {"min_p": 0}, {"min_p": 1}, {"top_k": -1}, {"top_k": 0}, {"top_k": 2**31 - 1}, {"top_k": np.int32(4)},
    {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"seed": np.int64(4)}, {"max_tokens": None, "min_tokens": 10**6}, {"max_tokens": 1},
    {"presence_penalty": -2}, {"frequency_penalty": 2}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100},
    {"logit_bias": {1: -100, "2": 100, np.int32(3): np.float32(0.5)}}, {"logit_bias": dict.fromkeys(range(300), 1)},
    {"allowed_token_ids": np.arange(5)}, {"bad_words": ["x"] * 128}, {"bad_words": ["\n", " "]},
    {"logits_processors": [max]}, {"prompt_logprobs": 0}, {"prompt_logprobs": 0, "max_tokens": 0}, {"n": MAX_SAMPLES}, {"n": 3, "best_of": 3}, {"n": 3, "best_of": None},
    {"min_tokens": 16}, {"logprobs": 0}, {"stop": ["x"] * MAX_STOP_STRINGS}, {"stop_token_ids": range(MAX_STOP_TOKEN_IDS)},
]  # fmt: skip


@pytest.mark.parametrize("values", ACCEPTED)
def test_values_at_the_limits_are_accepted(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        got = getattr(params, name)
        if name == "logit_bias":
            assert got == {int(token): bias for token, bias in value.items()}
        else:
            assert got == (value if np.isscalar(value) or value is None else tuple(value))


def test_what_edits_logits_is_known_by_its_values():
    for neutral in ({}, {"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "bad_words": ()}):
        assert not SamplingParams(**neutral).edits_logits
    for fields in (
        {"presence_penalty": -1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 0.9}, {"logit_bias": {0: 0}},
        {"allowed_token_ids": [0]}, {"bad_words": ["a"]}, {"logits_processors": [max]},
    ):  # fmt: skip
        assert SamplingParams(**fields).edits_logits


def test_one_stop_string_is_not_taken_apart():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=None).stop == () and SamplingParams(stop_token_ids=None).stop_token_ids == ()


@pytest.mark.parametrize("temperature, is_greedy", [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_temperature_too_small_to_divide_by_is_greedy(temperature, is_greedy):
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy


def test_parameters_cannot_change_under_a_running_request():
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ("a",) and hash(params) == hash(SamplingParams(stop="a"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0


def test_defaults_switch_every_filter_off():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (1.0, 0, 1.0, 0.0, None)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.ignore_eos) == (16, 0, None, False)


def test_unknown_parameter_is_refused_by_name():
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=1.0)
