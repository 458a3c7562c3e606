"""Span: something that took time. HostProbe: the spans of an engine's parts, taken from outside."""

import time
from collections import Counter
from dataclasses import dataclass

from jax.profiler import TraceAnnotation

from jpaged.engine import LLMEngine

STEP = "step"
WAIT = "wait and read back"
PARTS = ("schedule", "pack", "dispatch", WAIT, "update", "detokenise")  # of a step, in order; none holds another
TRACE_PREFIX = "jpaged: "  # of the same spans in a trace


@dataclass(frozen=True, slots=True)
class Span:
    """Nanoseconds, on the clock of whoever took them."""

    name: str
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class HostProbe:
    """While entered, times the engine's methods by standing in for them: an engine that nobody profiles pays nothing.

    A trace that is taken meanwhile shows the same spans, on its own clock.
    """

    def __init__(self, engine: LLMEngine):
        self.spans: list[Span] = []
        self.buckets: Counter = Counter()  # of the steps given to the device
        self._stand_ins = [
            (engine, "step", STEP),
            (engine.scheduler, "schedule", "schedule"),
            (engine.batch_builder, "build", "pack"),
            (engine.runner, "submit", "dispatch"),
            (engine.in_flight, "retire", WAIT),
            (engine.scheduler, "update", "update"),
            (engine.results, "process", "update"),
            (engine, "read", "detokenise"),
        ]

    def __enter__(self) -> "HostProbe":
        for owner, method, name in self._stand_ins:
            setattr(owner, method, self._timed(name, getattr(owner, method)))
        return self

    def __exit__(self, *_) -> None:
        for owner, method, _ in self._stand_ins:
            delattr(owner, method)  # the class's own is there again

    def _timed(self, name: str, method):
        def timed(*args, **kwargs):
            if name == "dispatch":
                self.buckets[args[0].bucket] += 1
            with TraceAnnotation(TRACE_PREFIX + name):
                begin = time.perf_counter_ns()
                try:
                    return method(*args, **kwargs)
                finally:
                    self.spans.append(Span(name, begin, time.perf_counter_ns()))

        return timed
