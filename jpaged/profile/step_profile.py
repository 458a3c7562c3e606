"""StepProfile: the mean decode step in parts, on the host and on the device, and its table."""

from dataclasses import dataclass

from jpaged.profile.op_groups import GROUPS, OpGroups
from jpaged.profile.spans import PARTS, STEP, WAIT, Span
from jpaged.profile.timeline import GAP, OTHER, Segment, device_timeline, totals, wait_and_read_back
from jpaged.profile.trace import Trace

WAITING, READING = "wait for the device", "read back"
OTHER_HOST, BETWEEN = "rest of the step", "between steps"
HOST_ORDER = ("schedule", "pack", "dispatch", WAITING, READING, "update", "detokenise", OTHER_HOST, BETWEEN)
DEVICE_ORDER = (*GROUPS, OTHER, GAP)


@dataclass(frozen=True)
class HostTimes:
    """Milliseconds a step, by part; a step lasts from its begin to the next one's."""

    step_ms: float
    parts: dict[str, float]


def host_times(spans: list[Span]) -> HostTimes:
    """The mean over all steps but the last, whose successor nobody saw."""
    steps = sorted((span for span in spans if span.name == STEP), key=lambda span: span.begin)
    begin, end, count = steps[0].begin, steps[-1].begin, len(steps) - 1
    inside = [span for span in spans if begin <= span.begin < end]
    parts = {name: _ms(sum(s.length for s in inside if s.name == name), count) for name in PARTS}
    in_steps = _ms(sum(step.length for step in steps[:-1]), count)
    parts[OTHER_HOST] = in_steps - sum(parts.values())
    parts[BETWEEN] = _ms(end - begin, count) - in_steps
    return HostTimes(_ms(end - begin, count), parts)


@dataclass(frozen=True)
class StepProfile:
    """host and device: milliseconds a step, in the traced steps; plain: of as many steps without a trace.

    The sample is one of the traced steps, its length the median.
    """

    num_steps: int
    plain: HostTimes
    host: HostTimes
    device: dict[str, float]
    sample: list[Segment]
    sample_host: list[Span]

    @classmethod
    def of(cls, plain_spans: list[Span], trace: Trace, op_groups: OpGroups) -> "StepProfile":
        """Raises ValueError where the trace shows no operation of the device."""
        if not trace.ops:
            raise ValueError("the trace shows no operation of the device: this backend's profiler is not understood")
        steps = [span for span in trace.host if span.name == STEP]
        begin, end, count = steps[0].begin, steps[-1].begin, len(steps) - 1
        segments = device_timeline(trace, op_groups, begin, end)
        host = host_times(trace.host)
        waits = [span for span in trace.host if span.name == WAIT and begin <= span.begin < end]
        waited, read = (_ms(ns, count) for ns in wait_and_read_back(waits, trace.runs))
        parts = {name: ms for name, ms in host.parts.items() if name != WAIT} | {WAITING: waited, READING: read}
        lengths = sorted((after.begin - step.begin, step.begin) for step, after in zip(steps, steps[1:]))
        length, at = lengths[len(lengths) // 2]
        return cls(
            num_steps=count,
            plain=host_times(plain_spans),
            host=HostTimes(host.step_ms, parts),
            device={group: _ms(ns, count) for group, ns in totals(segments).items()},
            sample=device_timeline(trace, op_groups, at, at + length),
            sample_host=[s for s in trace.host if s.name != STEP and at <= s.begin < at + length],
        )

    def table(self) -> str:
        step = self.host.step_ms
        plain_wait = f"{self.plain.parts[WAIT]:9.2f}"
        plain = {name: f"{ms:9.2f}" for name, ms in self.plain.parts.items()} | {
            WAITING: plain_wait,
            READING: "    with it",
        }
        lines = [f"{'':24}{'ms':>9}{'part':>8}{'untraced ms':>14}", "host"]
        lines += [_row(name, self.host.parts[name], step, plain[name].strip()) for name in HOST_ORDER]
        lines.append(_row("a step", sum(self.host.parts.values()), step, f"{self.plain.step_ms:.2f}"))
        lines.append("device")
        lines += [_row(name, self.device[name], step) for name in DEVICE_ORDER if name in self.device]
        lines.append(_row("a step", sum(self.device.values()), step))
        return "\n".join(lines)

    def check(self) -> str:
        """Whether the parts are the whole, and the traced steps like those without a trace."""
        total, step, plain = sum(self.device.values()), self.host.step_ms, self.plain.step_ms
        return (
            f"The device's parts add up to {total:.2f} ms, and a step lasts {step:.2f} ms in the trace; without a trace "
            f"{plain:.2f} ms ({step / plain - 1:+.0%} by tracing, or by what else the machine does)."
        )


def _ms(ns: float, count: int) -> float:
    return ns / count / 1e6


def _row(name: str, ms: float, step: float, plain: str = "") -> str:
    return f"  {name:22}{ms:9.2f}{ms / step:8.1%}{plain:>14}".rstrip()
