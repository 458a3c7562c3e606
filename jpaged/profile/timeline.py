"""Timeline: every moment of a window given to what the device did in it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jpaged.profile.op_groups import OpGroups
from jpaged.profile.spans import Span
from jpaged.profile.trace import Op, Trace

OTHER = "other"  # a program runs, but nothing of the model does: loops between operations, what has no scope
GAP = "gap"  # no program runs


@dataclass(frozen=True, slots=True)
class Segment:
    """A time in which the same operations ran; threads that worked on several groups share it equally."""

    begin: int
    end: int
    groups: tuple[str, ...]


def device_timeline(trace: Trace, op_groups: OpGroups, begin: int, end: int) -> list[Segment]:
    """Segments without a hole from begin to end.

    Operations overlap: loops hold others, and threads run several at once. A moment belongs to the plain operations in
    it; without one, to the innermost loop or branch; without any, to OTHER inside a program's execution, GAP outside.
    """
    spans = [span for span in (*trace.runs, *trace.ops) if span.length > 0]
    edges = [(span.begin, 1, index) for index, span in enumerate(spans)]
    edges += [(span.end, 0, index) for index, span in enumerate(spans)]
    plain: Counter[str] = Counter()
    around: dict[int, str | None] = {}  # the open runs, loops and branches, in order of their begin
    segments, now = [], begin
    for time, opens, index in sorted(edges):
        if min(time, end) > now:
            segments.append(Segment(now, min(time, end), _owners(plain, around)))
            now = min(time, end)
        span = spans[index]
        group = op_groups.group(span.name) if isinstance(span, Op) else None
        if isinstance(span, Op) and not op_groups.is_container(span.name):
            plain[group or OTHER] += 1 if opens else -1
        elif opens:
            around[index] = group
        else:
            around.pop(index)
    if end > now:
        segments.append(Segment(now, end, (GAP,)))
    return segments


def _owners(plain: Counter[str], around: dict[int, str | None]) -> tuple[str, ...]:
    active = tuple(sorted(plain.elements()))
    if active:
        return active
    if not around:
        return (GAP,)
    return (next((group for group in reversed(around.values()) if group), OTHER),)


def totals(segments: Iterable[Segment]) -> dict[str, float]:
    """Nanoseconds of each group; they add up to the segments' length."""
    result: Counter[str] = Counter()
    for segment in segments:
        for group in segment.groups:
            result[group] += (segment.end - segment.begin) / len(segment.groups)
    return dict(result)


def wait_and_read_back(waits: list[Span], runs: list[Span]) -> tuple[int, int]:
    """(nanoseconds that the host waited for a program's end, and that it needed from there to the result).

    A wait is for the program that ends nearest to its own end: the next one may run by then.
    """
    waited = read = 0
    for wait in waits:
        done = min((run.end for run in runs), key=lambda end: abs(end - wait.end), default=wait.begin)
        done = min(max(done, wait.begin), wait.end)
        waited += done - wait.begin
        read += wait.end - done
    return waited, read
