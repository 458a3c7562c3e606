"""The timeline: every moment is somebody's, and nobody's twice."""

import random

import pytest

from jpaged.profile.op_groups import GROUPS
from jpaged.profile.spans import Span
from jpaged.profile.timeline import GAP, OTHER, device_timeline, totals, wait_and_read_back
from jpaged.profile.trace import Op, Trace


class Named:
    """Op groups by the first letters of an instruction's name; capitals are loops."""

    def group(self, name):
        return {"a": "attention", "m": "mlp", "L": None, "A": "attention"}.get(name[0])

    def is_container(self, name):
        return name[0].isupper()


def shares(ops, begin, end):
    trace = Trace([], sorted((Op(name, b, e, ("step", run)) for name, b, e, run in ops), key=lambda op: op.begin))
    return totals(device_timeline(trace, Named(), begin, end))


def test_an_operation_owns_its_time_and_a_loop_what_is_left_of_its_own():
    ops = [("L", 0, 100, 1), ("a", 10, 30, 1), ("A", 40, 90, 1), ("m", 50, 60, 1)]
    assert shares(ops, 0, 100) == {"attention": 20 + 40, "mlp": 10, OTHER: 10 + 10 + 10}


def test_threads_share_a_moment_and_time_without_a_program_is_a_gap():
    ops = [("a", 0, 10, 1), ("m", 5, 15, 1), ("m", 30, 40, 2)]
    assert shares(ops, 0, 50) == {"attention": 5 + 2.5, "mlp": 2.5 + 5 + 10, GAP: 15 + 10}


def test_time_between_operations_of_one_execution_is_no_gap():
    assert shares([("a", 0, 10, 1), ("m", 20, 30, 1)], 0, 30) == {"attention": 10, OTHER: 10, "mlp": 10}


def test_only_the_window_counts():
    assert shares([("a", 0, 100, 1)], 20, 50) == {"attention": 30}
    assert shares([], 20, 50) == {GAP: 30}


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_the_window_and_segments_leave_no_hole(seed):
    rng = random.Random(seed)
    ops = []
    for _ in range(60):
        begin = rng.randrange(1000)
        ops.append(Op(rng.choice("amxLA"), begin, begin + rng.choice([0, 1, 40, 300]), ("step", begin // 200)))
    segments = device_timeline(Trace([], sorted(ops, key=lambda op: op.begin)), Named(), 100, 900)
    assert segments[0].begin == 100 and segments[-1].end == 900
    assert all(a.end == b.begin for a, b in zip(segments, segments[1:]))
    found = totals(segments)
    assert sum(found.values()) == pytest.approx(800) and set(found) <= {*GROUPS, OTHER, GAP}


def test_a_wait_ends_with_the_program_that_ends_nearest_to_it():
    runs = [Span("run", 0, 100), Span("run", 100, 200), Span("run", 200, 310)]
    assert wait_and_read_back([Span("wait", 20, 104)], runs) == (80, 4)
    assert wait_and_read_back([Span("wait", 120, 202), Span("wait", 220, 308)], runs) == (80 + 88, 2)
    assert wait_and_read_back([Span("wait", 130, 135)], [Span("run", 0, 120)]) == (0, 5)  # it had been ready
    assert wait_and_read_back([Span("wait", 130, 135)], []) == (0, 5)
