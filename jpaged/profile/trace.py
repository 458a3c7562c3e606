"""Trace: what jax.profiler saw, read back: the host's spans and the device's operations, on one clock."""

from collections import defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

from jpaged.profile.spans import TRACE_PREFIX, HostProbe, Span

_END = "end: "  # XLA:CPU's mark that an operation is over, which may be later and on another thread than its event


@dataclass(frozen=True, slots=True)
class Op(Span):
    """One execution of one instruction; run is the same for all those of one execution of a program, where known."""

    run: tuple | None


@dataclass(frozen=True)
class Trace:
    """Both lists in order of their begin."""

    host: list[Span]
    ops: list[Op]

    @property
    def runs(self) -> list[Span]:
        """From the first operation of each program's execution to the end of its last."""
        by_run = defaultdict(list)
        for op in self.ops:
            if op.run is not None:
                by_run[op.run].append(op)
        return [Span("run", ops[0].begin, max(op.end for op in ops)) for ops in by_run.values()]


@contextmanager
def recording(folder: Path, probe: HostProbe):
    """Takes a trace of what runs inside, the probe's spans among it. Without Python's own calls, which would slow the host down and hide ours."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2
    with jax.profiler.trace(folder, profiler_options=options), probe:
        yield


def read_trace(folder: Path) -> Trace:
    """The newest trace under folder."""
    path = max(folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    planes = list(ProfileData.from_file(str(path)).planes)
    host, ops, ends = [], [], defaultdict(deque)
    on_device = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in planes:
        may_hold_ops = plane in on_device or not on_device
        for event in (event for line in plane.lines for event in line.events):
            begin, name = int(event.start_ns), event.name
            if name.startswith(TRACE_PREFIX):
                host.append(Span(name.removeprefix(TRACE_PREFIX), begin, begin + int(event.duration_ns)))
            elif name.startswith(_END):
                ends[name.removeprefix(_END)].append(begin + int(event.duration_ns))
            elif may_hold_ops and (op := _op(event, begin)) is not None:
                ops.append(op)
    return Trace(sorted(host, key=_begin), _with_ends(sorted(ops, key=_begin), ends))


def _begin(span: Span) -> int:
    return span.begin


def _op(event, begin: int) -> Op | None:
    stats = dict(event.stats)
    if "hlo_op" not in stats:
        return None
    run = (stats.get("hlo_module"), stats["run_id"]) if "run_id" in stats else None
    return Op(stats["hlo_op"], begin, begin + int(event.duration_ns), run)


def _with_ends(ops: list[Op], ends: dict[str, deque]) -> list[Op]:
    """The ops, each lasting until its mark; one instruction runs at a time, so marks come in the ops' order."""
    ends = {name: deque(sorted(times)) for name, times in ends.items()}
    result = []
    for op in ops:
        marks = ends.get(op.name, ())
        while marks and marks[0] < op.begin:  # of one that began before the trace
            marks.popleft()
        result.append(Op(op.name, op.begin, max(op.end, marks.popleft()) if marks else op.end, op.run))
    return result
