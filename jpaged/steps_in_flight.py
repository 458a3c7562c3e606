"""StepsInFlight: the steps that the devices were given and whose results the host has not seen."""

import time
from collections import deque
from dataclasses import dataclass

from jpaged.batch import HostStep
from jpaged.errors import KernelCheckFailed
from jpaged.levels import Levels
from jpaged.model_runner import ModelRunner, PendingResult, StepResult
from jpaged.scheduler import Scheduler
from jpaged.scheduler_output import SchedulerOutput
from jpaged.step_metrics import StepStats


class StepFailed(Exception):
    """A step that the devices could not run: its plan, and what they said."""

    def __init__(self, plan: SchedulerOutput, error: Exception):
        super().__init__(str(error))
        self.plan, self.error = plan, error


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step and its result to come. idle_seconds: how long the devices had waited for it."""

    plan: SchedulerOutput
    num_padding_tokens: int
    result: PendingResult
    idle_seconds: float
    host_step: HostStep  # its buffer must outlive the step: the device may read it in place

    def stats(self, scheduler: Scheduler, num_generated: int) -> StepStats:
        """What it did, and the levels now that its result is in."""
        plan = self.plan
        return StepStats(
            levels=Levels.of(scheduler),
            num_scheduled_tokens=plan.num_tokens,
            num_padding_tokens=self.num_padding_tokens,
            num_prompt_tokens=plan.num_new_prompt_tokens,
            num_generation_tokens=num_generated,
            num_preemptions=plan.num_preempted,
            num_swapped_out=len(plan.swapped_out),
            num_draft_tokens=plan.num_draft_tokens,
            num_accepted_tokens=plan.num_accepted_tokens,
            prefix_cache_queries=plan.num_prefix_queries,
            prefix_cache_hits=plan.num_prefix_hits,
            host_gap_seconds=self.idle_seconds,
        )


class StepsInFlight:
    """A queue, oldest first. depth: how many may stay in it while the host goes on (0: each is waited for)."""

    def __init__(self, runner: ModelRunner, depth: int):
        self._runner = runner
        self._depth = depth
        self._steps: deque[StepInFlight] = deque()
        self._drained_at: float | None = None  # when the last result came in and nothing was left to run

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) > self._depth

    def submit(self, plan: SchedulerOutput, host_step: HostStep, planned_since: float) -> None:
        """Dispatches a step whose planning began at planned_since. Raises StepFailed, or KernelCheckFailed."""
        now = time.monotonic()
        if self._steps:  # a device that has already finished has waited since then, or since a moment before
            idle_seconds = now - planned_since if self._steps[-1].result.is_ready else 0.0
        else:
            idle_seconds = now - (self._drained_at or now)
        try:
            result = self._runner.submit(host_step)
        except KernelCheckFailed:
            raise
        except Exception as error:  # whatever the device says: the engine decides what it means
            raise StepFailed(plan, error) from error
        num_padding = host_step.bucket[0] - plan.num_tokens
        self._steps.append(StepInFlight(plan, num_padding, result, idle_seconds, host_step))

    def retire(self) -> tuple[StepInFlight, StepResult]:
        """Waits for the oldest step. Raises StepFailed, and keeps the step."""
        step = self._steps[0]
        try:
            result = step.result.read()
        except Exception as error:  # as in `submit`
            raise StepFailed(step.plan, error) from error
        self._steps.popleft()
        self._drained_at = time.monotonic()
        return step, result

    def rest(self) -> None:
        """Says that the devices now wait for requests and not for the host."""
        self._drained_at = None

    def clear(self) -> None:
        """Forgets the steps: their results are lost."""
        self._steps.clear()
