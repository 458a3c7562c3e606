"""Interrupts held back: none comes within, none is lost, and the handler that stood there stands there again."""

import signal
import threading
import time

import pytest

from jpaged.interrupts import InterruptsHeldBack, interrupts_let_through
from jpaged.programs import Programs


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert InterruptsHeldBack.current is None
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def is_plain() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_at_the_end_and_once():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptsHeldBack():
            interrupt()
            seen.append("went on")
    assert seen and is_plain()
    with InterruptsHeldBack():
        pass


def test_an_interrupt_comes_where_it_is_asked_for_and_is_held_back_again_after_that():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptsHeldBack() as interrupts:
            interrupts.deliver()
            interrupt()
            try:
                interrupts.deliver()
            finally:
                interrupt()
                seen.append("went on")
    assert seen and is_plain()


def test_a_users_own_handler_hears_of_every_one_after_the_end():
    heard = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame is not None)))
    with InterruptsHeldBack():
        interrupt()
        interrupt()
        assert not heard
    assert heard == [(signal.SIGINT, True)] * 2


def test_one_within_another_changes_nothing():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptsHeldBack():
            with InterruptsHeldBack() as inner:
                interrupt()
                inner.deliver()
            seen.append("went on")
    assert seen and is_plain()


def test_an_exception_goes_on_and_an_interrupt_that_waits_comes_after_it():
    with pytest.raises(KeyError), InterruptsHeldBack():
        raise KeyError
    with pytest.raises(KeyboardInterrupt) as error, InterruptsHeldBack():
        interrupt()
        raise KeyError
    assert isinstance(error.value.__context__, KeyError) and is_plain()


def test_one_is_let_through_and_the_next_waits_while_it_unwinds():
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptsHeldBack():
            try:
                with interrupts_let_through():
                    interrupt()
                    seen.append("too late")
            except KeyboardInterrupt:
                interrupt()
                seen.append("went on")
    assert seen == ["went on"] and is_plain()


def test_what_has_waited_comes_before_what_may_take_long():
    with pytest.raises(KeyboardInterrupt), InterruptsHeldBack():
        interrupt()
        with interrupts_let_through():
            pytest.fail("it was begun")


def test_a_handler_that_somebody_sets_meanwhile_stays():
    heard = []
    with InterruptsHeldBack():
        signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    interrupt()
    assert heard


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_no_function_handles_it_nothing_is_changed(handler):
    signal.signal(signal.SIGINT, handler)
    with InterruptsHeldBack(), interrupts_let_through():
        assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_holds_nothing_back():
    seen = []

    def work():
        with InterruptsHeldBack(), interrupts_let_through():
            seen.append(is_plain())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_who_waits_for_a_program_can_be_interrupted_and_it_is_compiled_all_the_same():
    gate, calls = threading.Event(), []

    def compile_program(key):
        calls.append(key)
        assert gate.wait(10)
        return key.upper

    programs = Programs(compile_program, ["a"], lambda phase: None)
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), InterruptsHeldBack():
        programs["a"]
    assert time.monotonic() - begin < 5
    gate.set()
    assert programs["a"]() == "A" and calls == ["a"]
