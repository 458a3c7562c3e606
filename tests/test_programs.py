"""Programs: compiled once whoever asks, in the background or on first use, and a failure is no one's last word."""

import logging
import threading
import time

import pytest

from jpaged.programs import Programs


class Compiler:
    """A compile function that waits for its gate, and fails as often as it is told to."""

    def __init__(self, *, is_open=True, num_failures=0):
        self.gate, self.started = threading.Event(), threading.Event()
        self.calls, self.num_failures = [], num_failures
        if is_open:
            self.gate.set()

    def __call__(self, key):
        self.calls.append(key)
        self.started.set()
        assert self.gate.wait(10)
        if self.num_failures:
            self.num_failures -= 1
            raise MemoryError(f"no room for {key}")
        return lambda: f"program {key}"


def ask_at_once(programs, key, num_threads):
    """What each of several threads gets, or the error that it sees."""
    answers, barrier = [], threading.Barrier(num_threads)

    def ask():
        barrier.wait(10)
        try:
            answers.append(programs[key])
        except MemoryError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads, answers


def finish(threads):
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_threads_that_ask_at_once_share_one_compilation():
    compiler, phases = Compiler(is_open=False), []
    programs = Programs(compiler, ["a", "b"], phases.append)
    threads, answers = ask_at_once(programs, "a", 8)
    assert compiler.started.wait(10)
    time.sleep(0.05)  # the others come to wait
    compiler.gate.set()
    finish(threads)
    assert compiler.calls == ["a"] and phases == ["serving"]
    assert len(answers) == 8 and len(set(answers)) == 1 and answers[0]() == "program a"
    assert (programs.num_compiled, programs.is_complete) == (1, False)


def test_program_is_compiled_once_and_for_each_key():
    compiler = Compiler()
    programs = Programs(compiler, [1, 2], lambda phase: None)
    assert programs[1] is programs[1] and programs[2] is not programs[1]
    assert compiler.calls == [1, 2] and programs.is_complete


def test_failure_reaches_everyone_who_waits_and_the_next_caller_tries_again():
    compiler, phases = Compiler(is_open=False, num_failures=1), []
    programs = Programs(compiler, ["a"], phases.append)
    first, answers = ask_at_once(programs, "a", 1)
    assert compiler.started.wait(10)
    others, other_answers = ask_at_once(programs, "a", 4)
    time.sleep(0.05)
    compiler.gate.set()
    finish(first + others)
    assert compiler.calls == ["a"] and {str(answer) for answer in answers + other_answers} == {"no room for a"}
    assert (programs.num_compiled, phases, programs.is_complete) == (0, [], False)
    assert programs["a"]() == "program a"
    assert (programs.num_compiled, phases, programs.is_complete) == (1, ["serving"], True)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_background_compiles_all_in_order_and_counts_as_warm_up():
    compiler, phases = Compiler(), []
    programs = Programs(compiler, [3, 1, 2], phases.append)
    programs.compile_in_background()
    wait_until(lambda: len(phases) == 3)
    programs.close()
    assert compiler.calls == [3, 1, 2] and phases == ["warmup"] * 3 and programs.is_complete and programs.error is None


def test_background_leaves_alone_what_first_use_has_compiled():
    compiler, phases = Compiler(), []
    programs = Programs(compiler, [1, 2], phases.append)
    programs[2]
    programs.compile_all()
    assert compiler.calls == [2, 1] and phases == ["serving", "warmup"]


def test_serving_goes_on_beside_the_program_in_the_background():
    compiler = Compiler(is_open=False)
    programs = Programs(
        lambda key: compiler(key) if key == "slow" else (lambda: key), ["slow", "quick"], lambda phase: None
    )
    programs.compile_in_background()
    assert compiler.started.wait(10)
    assert programs["quick"]() == "quick"
    compiler.gate.set()
    programs.close()


def test_close_stops_after_the_program_in_hand():
    compiler = Compiler(is_open=False)
    programs = Programs(compiler, list(range(5)), lambda phase: None)
    programs.compile_in_background()
    assert compiler.started.wait(10)
    closing = threading.Thread(target=programs.close, daemon=True)
    closing.start()
    wait_until(programs._stopping.is_set)
    compiler.gate.set()
    finish([closing])
    assert compiler.calls == [0]


def test_close_without_a_background_returns():
    Programs(Compiler(), [1], lambda phase: None).close()


def test_failure_in_the_background_is_told_and_left_to_first_use(caplog):
    compiler = Compiler(num_failures=1)
    programs = Programs(compiler, ["a", "b"], lambda phase: None)
    with caplog.at_level(logging.ERROR):
        programs.compile_in_background()
        wait_until(lambda: programs.error is not None)
        programs.close()
    assert str(programs.error) == "no room for a" and not programs.is_complete
    assert "compiling ahead failed" in caplog.text
    assert programs["a"]() == "program a"


def test_program_that_a_step_needs_after_the_warm_up_is_counted_and_logged_with_the_reason(caplog):
    phases = []
    programs = Programs(Compiler(), [(2, 2), (4, 4)], phases.append)
    programs.compile_all()
    assert programs[(3, 1)]() == "program (3, 1)" and phases == ["warmup", "warmup", "serving"]
    assert "for program (3, 1): it is none of the 2 that were compiled ahead" in caplog.text
    caplog.clear()
    assert programs[(3, 1)]() == programs[(3, 1)]() and not caplog.text


def test_program_missing_because_the_warm_up_was_given_up_says_so(caplog):
    programs = Programs(Compiler(num_failures=1), ["a"], lambda phase: None)
    programs.compile_in_background()
    programs.close()
    programs["a"]
    assert "for program a: compiling ahead was given up (MemoryError('no room for a'))" in caplog.text


def test_first_use_before_the_warm_up_is_over_is_no_news(caplog):
    programs = Programs(Compiler(), [1, 2], lambda phase: None)
    programs.is_sealed = True
    programs[1]
    programs[3]  # one too many does not stand for the one that is missing
    assert programs.num_compiled == 2 and not programs.is_complete and not caplog.text


def test_sealed_table_refuses_what_comes_after_the_warm_up():
    compiler = Compiler()
    programs = Programs(compiler, [1, 2], lambda phase: None)
    programs.is_sealed = True
    programs.compile_all()
    assert programs[1]() == "program 1"
    with pytest.raises(AssertionError, match="a step needs program 3: it is none of the 2"):
        programs[3]
    assert compiler.calls == [1, 2]
