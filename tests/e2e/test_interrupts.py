"""Whatever ends a call of LLM's and whenever: the next one answers as a fresh engine does, and nothing is left of the first."""

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from tiny_model import make_tiny_model

import jpaged
from jpaged import LLM
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

HELD_BY_NOBODY = {"interrupts.py"}  # of SIGINT, nothing reaches what holds it back
FOLDER = str(Path(jpaged.__file__).parent)

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[5 + number] * (3 + 5 * number) for number in range(6)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def make_llm(model: str, programs_dir: str, **config) -> LLM:
    """In bfloat16, in which answers are equal to the bit, and with a pool from which somebody has to go."""
    defaults = {
        "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "token_buckets": (8, 32), "max_model_len": 64,
        "num_blocks_override": 19, "compilation_cache_dir": programs_dir,
    }  # fmt: skip
    return LLM(model, **defaults | config)


@pytest.fixture(
    scope="module",
    params=[
        {"preemption_mode": "swap"},
        {"async_scheduling": False, "preemption_mode": "recompute"},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=["overlap and swap", "no overlap", "drafts"],
)
def llm(request, tiny, programs_dir) -> Iterator[LLM]:
    llm = make_llm(tiny, programs_dir, **request.param)
    yield llm
    llm.close()


def as_it_is(output_token_ids, logits):
    return logits


MIXED = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 6},
    {"temperature": 0, "n": 2, "use_beam_search": True, "max_tokens": 5},
    {"temperature": 0, "stop": ["a", "b", "c"], "logprobs": 1},
    {"temperature": 0, "prompt_logprobs": 1, "max_tokens": 3},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 1.0, "logits_processors": [as_it_is], "max_tokens": 4},
]
MIXED_PARAMS = [SamplingParams(**{"ignore_eos": True, "max_tokens": 9} | fields) for fields in MIXED]
MIXED_PROMPTS = [[7, 8, 9] * 4, [7, 8, 9] * 3, [3, 4], [7, 8, 9] * 5, [5, 6] * 4, [9] * 7]


def mixed(llm: LLM) -> list[RequestOutput]:
    """One of every kind."""
    return llm.generate(MIXED_PROMPTS, MIXED_PARAMS, use_tqdm=False)


def answers(outputs: list[RequestOutput]) -> list[list[tuple]]:
    return [[(o.text, o.token_ids, o.finish_reason, o.error) for o in output.outputs] for output in outputs]


def check_that_nothing_is_left(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.requests and not engine._readers and not engine.has_work and not engine.scheduler.in_flight
    engine.kv.check_invariants([])
    assert engine.kv.pool.num_used == engine.pins.num_blocks and engine.kv.swap_space.num_used == 0
    assert len(engine.scheduler.queues.rows._free_rows) == engine.config.max_num_seqs
    assert len(engine.scheduler.queues.rows._free_edit_slots) == engine.config.max_num_edited_seqs


@contextlib.contextmanager
def raising(error: type[BaseException], when: Callable[[FrameType, str], bool]) -> Iterator[None]:
    """Raises it once, at the call of one of jpaged's functions or at its return, as soon as when says so."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "return") and file.startswith(FOLDER) and os.path.basename(file) not in HELD_BY_NOBODY:
            if when(frame, event):
                raise error("at the worst moment")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def events_of(llm: LLM, call: Callable[[LLM], object]) -> list[tuple]:
    """Every call and return of jpaged's functions in a call of the door, in order."""
    seen = []
    with raising(KeyboardInterrupt, lambda frame, event: seen.append((frame.f_code, event))):
        call(llm)
    return seen


def interrupt_at(llm: LLM, number: int, error: type[BaseException], call: Callable[[LLM], object]) -> None:
    """In the event of that number."""
    count = iter(range(10**9))
    with contextlib.suppress(error), raising(error, lambda frame, event: next(count) == number):
        call(llm)


def some_of_each(events: list[tuple], at_most: int) -> list[int]:
    """The numbers of events: of each kind some, from the first on, evenly."""
    numbers = defaultdict(list)
    for number, event in enumerate(events):
        numbers[event].append(number)
    return sorted(n for of_kind in numbers.values() for n in of_kind[:: -(-len(of_kind) // at_most)])
