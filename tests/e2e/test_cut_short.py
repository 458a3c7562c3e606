"""Whatever ends a call of LLM's, and whenever: the next one answers as a fresh engine does, and nothing is left of the first."""

import contextlib
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
import jpaged.llm
from jpaged import LLM
from jpaged.errors import KernelCheckFailed
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

FOLDER = str(Path(jpaged.__file__).parent)
HOLDS_BACK = "interrupts.py"  # no interrupt reaches what holds it back

PROMPTS = [[5 + number] * (3 + 5 * number) for number in range(6)]
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def make_llm(model: str, programs_dir: str, **config) -> LLM:
    """In bfloat16, in which answers are equal to the bit."""
    defaults = {
        "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "token_buckets": (8, 32),
        "num_blocks_override": 1000, "compilation_cache_dir": programs_dir,
    }  # fmt: skip
    return LLM(model, **defaults | config)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(tiny, programs_dir) -> Iterator[LLM]:
    llm = make_llm(tiny, programs_dir)
    yield llm
    llm.close()


@pytest.fixture
def expected(llm) -> list[list[tuple]]:
    """What a fresh engine answers, and the prompts in its cache."""
    assert llm.reset_prefix_cache()
    return ask(llm)


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def answers(outputs: list[RequestOutput]) -> list[list[tuple]]:
    return [[(o.text, o.token_ids, o.finish_reason, o.error) for o in output.outputs] for output in outputs]


def ask(llm: LLM) -> list[list[tuple]]:
    return answers(llm.generate(PROMPTS, SHORT, use_tqdm=False))


def is_cached(llm: LLM) -> bool:
    (output,) = llm.generate([PROMPTS[-1]], SHORT, use_tqdm=False)
    return output.num_cached_tokens == (len(PROMPTS[-1]) - 1) // 4 * 4


def check_that_nothing_is_left(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.requests and not engine._readers and not engine.scheduler.has_work
    assert len(engine.in_flight) == len(engine.scheduler.in_flight)  # steps whose requests have been aborted
    engine.kv.check_invariants(engine.scheduler.sequences)
    assert engine.kv.pool.num_used == engine.kv.swap_space.num_used == 0
    rows = engine.scheduler.queues.rows
    assert len(rows._free_rows) == engine.config.max_num_seqs
    assert len(rows._free_edit_slots) == engine.config.max_num_edited_seqs


def fail_once(monkeypatch, owner: object, name: str, error: BaseException, *, at: int = 1, late: bool = False) -> None:
    """Raises in the at-th call of a method, or after it has done its work."""
    method, count = getattr(owner, name), iter(range(1, 10**9))

    def failing(*args, **kwargs):
        is_time = next(count) == at
        if is_time and not late:
            raise error
        result = method(*args, **kwargs)
        if is_time:
            raise error
        return result

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_interrupt_as_a_step_is_submitted_costs_nothing_but_the_call(
    llm, expected, monkeypatch, caplog, overlap, error, late
):
    """late: the devices have the step, and nobody knows of it."""
    monkeypatch.setattr(llm.engine.in_flight, "_depth", int(overlap))
    with monkeypatch.context() as once:
        fail_once(once, llm.engine.runner, "submit", error(), at=5, late=late)
        with pytest.raises(error):
            ask(llm)
    check_that_nothing_is_left(llm)
    assert is_cached(llm) and ask(llm) == expected and not caplog.records


def test_who_steps_the_engine_himself_can_go_on_with_his_requests(llm, expected, monkeypatch):
    engine, tokens = llm.engine, defaultdict(list)
    fail_once(monkeypatch, engine.runner, "submit", KeyboardInterrupt(), at=5)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, SHORT)
    num_interrupts = 0
    while engine.has_work:
        try:
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert [tokens[str(number)] for number in range(len(PROMPTS))] == [of_one[0][1] for of_one in expected]
    check_that_nothing_is_left(llm)


def test_ctrl_c_at_any_time_ends_the_call_and_nothing_else(llm, expected, caplog):
    rng, num_interrupts = random.Random(0), 0
    for _ in range(25):
        timer = threading.Timer(rng.uniform(0, 0.12), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(PROMPTS * 2, LONG, use_tqdm=False)
            timer.join()
        except KeyboardInterrupt:
            num_interrupts += 1
        check_that_nothing_is_left(llm)
        assert is_cached(llm)
    assert ask(llm) == expected and not caplog.records
    assert num_interrupts == 25


def test_an_alarm_that_raises_at_any_time_leaves_an_engine_that_answers(llm, expected):
    """Not held back: it falls between any two byte codes, of the engine's own bookkeeping, too."""
    rng, before = random.Random(1), signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(15):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.12))
                llm.generate(PROMPTS * 2, LONG, use_tqdm=False)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert ask(llm) == expected
            check_that_nothing_is_left(llm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_logits_processor_that_takes_long_can_be_interrupted(llm, expected, caplog):
    def sleep(output_token_ids, logits):
        if len(output_token_ids) == 2:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(20)
        return logits

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logits_processors=[sleep])
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [SHORT, params] * 3, use_tqdm=False)
    assert time.monotonic() - begin < 10
    check_that_nothing_is_left(llm)
    assert is_cached(llm) and ask(llm) == expected and not caplog.records


def test_a_progress_bar_that_raises_ends_the_call_alone(llm, expected, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(jpaged.llm.tqdm, "update", lambda self, n: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, SHORT)
    check_that_nothing_is_left(llm)
    assert is_cached(llm) and ask(llm) == expected


def test_an_interrupt_as_requests_are_added_leaves_none_of_them(llm, expected, monkeypatch):
    with monkeypatch.context() as once:
        fail_once(once, llm.engine, "add_request", KeyboardInterrupt(), at=3, late=True)
        with pytest.raises(KeyboardInterrupt):
            ask(llm)
    check_that_nothing_is_left(llm)
    assert is_cached(llm) and ask(llm) == expected


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_pin_takes_no_room_and_may_be_tried_again(tiny, programs_dir, monkeypatch, at):
    llm = make_llm(tiny, programs_dir)
    engine, prefix = llm.engine, [7] * 45  # its last step fills a block in part
    num_usable = engine.validate.num_usable_blocks
    with monkeypatch.context() as once:
        fail_once(once, engine.runner, "submit", KeyboardInterrupt(), at=at)
        with pytest.raises(KeyboardInterrupt):
            llm.pin_prefix(prefix)
    check_that_nothing_is_left(llm)
    assert not engine.pins.prefixes and engine.validate.num_usable_blocks == num_usable
    llm.pin_prefix(prefix)
    with monkeypatch.context() as once:  # what is pinned stays
        fail_once(once, engine.runner, "submit", KeyboardInterrupt(), at=5)
        with pytest.raises(KeyboardInterrupt):
            ask(llm)
    (output,) = llm.generate([[*prefix, 8]], SHORT, use_tqdm=False)
    assert output.num_cached_tokens == 45 and engine.kv.pool.num_used == 12
    llm.close()


PARTS = {"planning": ("scheduler", "schedule"), "building": ("batch_builder", "build")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_memory_that_is_short_once_costs_no_request(llm, expected, monkeypatch, part, late):
    owner, name = PARTS[part]
    fail_once(monkeypatch, getattr(llm.engine, owner), name, MemoryError(), at=4, late=late)
    assert ask(llm) == expected
    check_that_nothing_is_left(llm)


@pytest.mark.parametrize("owner, name", [("scheduler", "update"), ("results", "process"), ("metrics", "on_step")])
def test_memory_that_is_short_as_tokens_are_told_fails_those_whose_tokens_are_lost(
    llm, expected, monkeypatch, owner, name
):
    with monkeypatch.context() as once:
        fail_once(once, getattr(llm.engine, owner), name, MemoryError("no room"), at=6, late=True)
        outputs = llm.generate(PROMPTS, SHORT, use_tqdm=False)
    for output, of_one in zip(outputs, expected):
        (got,) = output.outputs
        if got.finish_reason == "error":
            assert got.error == "the engine failed to compute this request: no room"
        else:
            assert answers([output]) == [of_one]
    assert any(output.outputs[0].error for output in outputs)
    check_that_nothing_is_left(llm)
    assert ask(llm) == expected


def test_memory_that_stays_short_fails_one_request_after_another(llm, expected, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr("jpaged.admission.Admission.admit_waiting", lambda self, budget, plan: bytes(1 << 62))
        outputs = llm.generate(PROMPTS, SHORT, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "error" for output in outputs)
    check_that_nothing_is_left(llm)
    assert ask(llm) == expected


def test_a_failed_kernel_check_is_the_end(tiny, programs_dir, monkeypatch):
    llm = make_llm(tiny, programs_dir)
    fail_once(monkeypatch, llm.engine.runner, "submit", KernelCheckFailed("wrong"), at=3)
    for _ in range(2):
        with pytest.raises(KernelCheckFailed, match="wrong"):
            ask(llm)
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


def mixed(llm: LLM) -> list[list[tuple]]:
    return answers(llm.generate(MIXED_PROMPTS, MIXED_PARAMS, use_tqdm=False))


@contextlib.contextmanager
def watching(see: Callable[[FrameType, str], None]) -> Iterator[None]:
    """Every call and every return of jpaged's functions in this thread; what see raises is raised there, once."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        folder, _, file = frame.f_code.co_filename.rpartition(os.sep)
        if event in ("call", "return") and folder == FOLDER and file != HOLDS_BACK:
            see(frame, event)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def events_of(llm: LLM, call: Callable[[LLM], object]) -> list[tuple]:
    events = []
    with watching(lambda frame, event: events.append((frame.f_code, event))):
        call(llm)
    return events


def cut_short(llm: LLM, number: int, error: type[BaseException], call: Callable[[LLM], object]) -> None:
    """Raises error in the event of that number."""
    count = iter(range(10**9))

    def see(frame: FrameType, event: str) -> None:
        if next(count) == number:
            raise error("at the worst moment")

    with contextlib.suppress(error), watching(see):
        call(llm)


def some_of_each(events: list[tuple], at_most: int) -> list[int]:
    """The numbers of the events: of each kind at most so many, from the first on."""
    numbers = defaultdict(list)
    for number, event in enumerate(events):
        numbers[event].append(number)
    return sorted(number for of_kind in numbers.values() for number in of_kind[:: -(-len(of_kind) // at_most)])


SWEPT = [
    pytest.param({"preemption_mode": "swap"}, KeyboardInterrupt, 8, id="swap"),
    pytest.param({"preemption_mode": "swap"}, MemoryError, 1, id="swap, memory", marks=pytest.mark.long),
    pytest.param({"async_scheduling": False}, KeyboardInterrupt, 1, id="no overlap", marks=pytest.mark.long),
    pytest.param(
        {"speculative_config": {"method": "ngram"}}, KeyboardInterrupt, 1, id="drafts", marks=pytest.mark.long
    ),
    pytest.param({"preemption_mode": "swap"}, KeyboardInterrupt, 0, id="everywhere", marks=pytest.mark.slow),
]


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it fell into a finalizer
@pytest.mark.parametrize("config, error, stride", SWEPT)
def test_an_exception_at_any_call_leaves_an_engine_that_answers(tiny, programs_dir, caplog, config, error, stride):
    """stride: of the kinds of events, one occurrence of every so many of them; 0: of all kinds all."""
    caplog.set_level("ERROR")
    llm = make_llm(tiny, programs_dir, max_model_len=64, num_blocks_override=19, **config)  # somebody has to go
    expected = mixed(llm)
    events = events_of(llm, mixed)
    assert llm.engine.metrics.num_preemptions
    for number in some_of_each(events, 1)[::stride] if stride else range(len(events)):
        cut_short(llm, number, error, mixed)
        where = f"event {number}, {events[number][1]} of {events[number][0].co_qualname}"
        assert error is MemoryError or not caplog.records, where
        assert mixed(llm) == expected, where
        check_that_nothing_is_left(llm)
    llm.close()
