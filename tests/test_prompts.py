"""Prompts in the forms that people have them, and what is said of the rest."""

import array
import asyncio

import jax.numpy as jnp
import numpy as np
import pytest
from engines import make_small_async_engine
from tiny_model import make_tiny_model

from jpaged import LLM
from jpaged.prompts import Prompt, read_prompt, read_prompts
from jpaged.sampling_params import SamplingParams

FORMS = 'must be text, token ids or {"prompt": text} or {"prompt_token_ids": ids}, got '


class Series:
    """As pandas': a column with its own index, which numpy reads."""

    def __init__(self, values, dtype=None):
        self._values = np.array(values, dtype)

    def __array__(self, dtype=None, copy=None):
        return self._values

    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        return iter(self._values)


class Column:
    """As that of a data set: it can be iterated, and that is all."""

    def __init__(self, *values):
        self._values = values

    def __iter__(self):
        return iter(self._values)


def encode(text: str) -> list[int]:
    if "\ud800" in text:
        raise ValueError("text must be a str that UTF-8 can hold")
    return list(text.encode())


def prompts(given) -> list[Prompt]:
    found = read_prompts(given, encode)
    for text, token_ids in found:
        assert text is None or type(text) is str
        assert all(type(token_id) is int for token_id in token_ids)
    return found


ONE = [(None, [5, 6])]
TWO = [(None, [5, 6]), (None, [7, 8])]
TEXTS = [("a", [97]), ("b", [98])]


@pytest.mark.parametrize(
    "given, found",
    [
        ("a", TEXTS[:1]),
        (np.str_("a"), TEXTS[:1]),
        ({"prompt": "a"}, TEXTS[:1]),
        ({"prompt": "a", "prompt_token_ids": None, "cache_salt": None}, TEXTS[:1]),
        ([5, 6], ONE),
        ((5, 6), ONE),
        (range(5, 7), ONE),
        (array.array("i", [5, 6]), ONE),
        ([np.int64(5), np.uint8(6)], ONE),
        ([jnp.int32(5), jnp.int32(6)], ONE),
        (np.array([5, 6]), ONE),
        (np.array([5, 6], np.uint16), ONE),
        (jnp.array([5, 6]), ONE),
        (Series([5, 6]), ONE),
        (Series([5, 6], object), ONE),
        ({"prompt_token_ids": np.array([5, 6])}, ONE),
        ({"prompt_token_ids": (np.int32(5), 6)}, ONE),
        ({"prompt": [5, 6]}, ONE),
        ({"prompt": "a", "prompt_token_ids": jnp.array([5, 6])}, [("a", [5, 6])]),
        ([[5, 6]], ONE),
        ([(5, 6), np.array([7, 8])], TWO),
        (np.array([[5, 6], [7, 8]]), TWO),
        (jnp.array([[5, 6], [7, 8]]), TWO),
        (np.array([[5, 6]]), ONE),
        ([jnp.array([5, 6]), jnp.array([7, 8])], TWO),
        (Series([np.array([5, 6]), [7, 8, 9]], object), [(None, [5, 6]), (None, [7, 8, 9])]),
        (("a", "b"), TEXTS),
        ((text for text in "ab"), TEXTS),
        (np.array(["a", "b"]), TEXTS),
        (np.array(["a", "b"], np.dtypes.StringDType()), TEXTS),
        (Series(["a", "b"], object), TEXTS),
        (Column("a", {"prompt": "b"}), TEXTS),
        ({0: "a", 1: "b"}.values(), TEXTS),
        (["a", [5, 6], {"prompt": "b"}, np.array([5, 6])], [TEXTS[0], *ONE, TEXTS[1], *ONE]),
        ([], []),
        ((), []),
        (np.array([]), []),
        (np.empty((0, 5), int), []),
        ([[]], [(None, [])]),
        ([-1, 10**12], [(None, [-1, 10**12])]),  # refused by the request's check, which knows the vocabulary
    ],
)
def test_prompts_are_read_in_the_forms_that_people_have(given, found):
    assert prompts(given) == found


@pytest.mark.parametrize(
    "given, says",
    [
        (None, "prompt 0 {}None"),
        (["a", "b", None], "prompt 2 {}None"),
        (5, "prompt 0 {}5"),
        (np.int64(5), "prompt 0 {}np.int64(5)"),
        (np.array(5), "prompt 0 {}array(5)"),
        (b"text", "prompt 0 {}b'text'"),
        ([b"text"], "prompt 0 {}b'text'"),
        ({"a", "b"}, "prompt 0 {}{{'a', 'b'}}"),
        ([True, False], "prompt 0 {}True"),
        ([[True, False]], "prompt 0 {}True as token id 0"),
        ([[np.True_]], "prompt 0 {}np.True_ as token id 0"),
        (np.array([True]), "prompt 0 {}an array of bool with shape (1,)"),
        ([1.0, 2.0], "prompt 0 {}1.0"),
        ([[1, 2.0]], "prompt 0 {}2.0 as token id 1"),
        ([[*range(500), None]], "prompt 0 {}None as token id 500"),
        (np.array([1.0, 2.0]), "prompt 0 {}an array of float64 with shape (2,)"),
        (jnp.array([1.0, 2.0]), "prompt 0 {}an array of float32 with shape (2,)"),
        (jnp.array([1, 2], jnp.bfloat16), "prompt 0 {}an array of bfloat16 with shape (2,)"),
        (np.zeros((2, 3, 4), int), "prompt 0 {}an array of int64 with shape (2, 3, 4)"),
        (["a", np.zeros((2, 3), int)], "prompt 1 {}an array of int64 with shape (2, 3)"),
        ([5, "a"], "prompt 0 {}'a' as token id 1"),
        (["a", 5], "prompt 1 {}5"),
        ([["a"]], "prompt 0 {}'a' as token id 0"),
        ({}, "prompt 0 {}None"),
        ({"prompt": None}, "prompt 0 {}None"),
        ({"prompt": 5}, "prompt 0 {}5"),
        ({"prompt": 5, "prompt_token_ids": [5]}, "prompt 0 {}5 as text"),
        ({"prompt_token_ids": "text"}, "prompt 0 {}'text'"),
        (["a", {"role": "user", "content": "a"}], "prompt 1 {}an object with 'role'"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt 0 {}an object with 'multi_modal_data'"),
        (["a", "\ud800"], "prompt 1: text must be a str that UTF-8 can hold"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_number_and_the_forms_are_told(given, says):
    with pytest.raises(ValueError) as caught:
        prompts(given)
    if isinstance(given, set):
        assert str(caught.value).startswith(f"prompt 0 {FORMS}{{")
    else:
        assert str(caught.value) == says.format(FORMS)


def test_one_prompt_alone_is_no_list_of_them():
    assert read_prompt({"prompt": "a"}, encode) == ("a", [97])
    for given in (["a"], np.zeros((1, 2), int)):
        with pytest.raises(ValueError, match="^prompt must be text, token ids or "):
            read_prompt(given, encode)


OPTIONS = {
    "block_size": 16, "max_model_len": 256, "num_blocks_override": 33, "max_num_seqs": 4, "max_num_batched_tokens": 4,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(model, programs_dir):
    llm = LLM(model, compilation_cache_dir=programs_dir, **OPTIONS)
    yield llm
    llm.close()


def test_every_way_into_the_engine_takes_every_form(llm):
    ids = llm.get_tokenizer().encode("hello")
    [want] = llm.generate("hello", GREEDY, use_tqdm=False)
    forms = [{"prompt": "hello"}, np.array(ids), jnp.array(ids), {"prompt_token_ids": np.array(ids)}, tuple(ids)]
    for given in (forms, *forms):
        for output in llm.generate(given, GREEDY, use_tqdm=False):
            assert output.outputs == want.outputs and output.prompt_token_ids == ids
            assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    [beams] = llm.beam_search(np.array(ids), 2, 3, use_tqdm=False)
    assert [b.token_ids for b in beams.outputs] == [
        b.token_ids for b in llm.beam_search("hello", 2, 3, use_tqdm=False)[0].outputs
    ]
    prefix = np.arange(1, 33)
    llm.pin_prefix(prefix)
    assert llm.generate([[*prefix, 5]], GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    with pytest.raises(ValueError, match="^prompt must be text"):
        llm.pin_prefix(None)


def test_sampling_params_come_one_for_all_or_one_each_of_any_iterable(llm):
    lengths = [2, 4]
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    for given in (each, tuple(each), iter(each), np.array(each, object)):
        outputs = llm.generate(("a", "b"), given, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    for given, says in (
        ({"max_tokens": 5}, "sampling_params must be SamplingParams, or one each, got {'max_tokens': 5}"),
        (5, "sampling_params must be SamplingParams, or one each, got 5"),
        ([GREEDY, {"max_tokens": 5}], r"sampling_params\[1\] must be SamplingParams, got {'max_tokens': 5}"),
        ([GREEDY], "2 prompts but 1 sampling_params"),
    ):
        with pytest.raises(ValueError, match=says):
            llm.generate(["a", "b"], given, use_tqdm=False)


async def last(stream):
    async for output in stream:
        pass
    return output


def test_the_engine_of_another_process_takes_the_same_forms(llm, model, programs_dir):
    engine = make_small_async_engine(model, compilation_cache_dir=programs_dir, num_blocks_override=33)
    try:
        ids = llm.get_tokenizer().encode("hello")
        for number, form in enumerate(({"prompt": "hello"}, np.array(ids), jnp.array(ids), [np.int64(i) for i in ids])):
            output = asyncio.run(last(engine.generate(form, GREEDY, f"r{number}")))
            assert output.prompt_token_ids == ids and len(output.outputs[0].token_ids) == 3
        with pytest.raises(ValueError, match="^prompt must be text, token ids or .*, got None$"):
            asyncio.run(last(engine.generate(None, GREEDY, "r")))
    finally:
        engine.shutdown()


def test_chat_goes_on_with_each_last_message_and_names_the_conversation_at_fault(llm):
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<"}]
    outputs = llm.chat([begun, begun[:1]], GREEDY, use_tqdm=False, continue_final_message=True)
    assert [output.prompt for output in outputs] == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<",
        "<|im_start|>user\nhi",
    ]
    [prompted] = llm.chat(begun[:1], GREEDY, use_tqdm=False)
    assert prompted.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="^conversation 1: continue_final_message needs text in the last message"):
        silent = [{"role": "assistant", "content": None}]
        llm.chat([begun, silent], GREEDY, use_tqdm=False, continue_final_message=True)
