"""Recovery: an engine that an exception has cut short is made whole, so that it can be used as before."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from jpaged.errors import KernelCheckFailed
from jpaged.interrupts import InterruptsHeldBack
from jpaged.outputs import TokenDelta
from jpaged.scheduler_output import SchedulerOutput
from jpaged.sequence import Sequence

logger = logging.getLogger(__name__)


class Recovery:
    """Of one EngineCore, whose parts it may replace.

    in_hand: while the books of the pool and the queues are being written, the sequences of whom nobody has been told
    what is written; None while they are whole.
    """

    def __init__(self, core: Any):  # an EngineCore, which has this
        self._core = core
        self.in_hand: list[Sequence] | None = None
        self.num_failed_steps = 0  # in a row
        self.check_failed: KernelCheckFailed | None = None

    @contextlib.contextmanager
    def whole(self, in_hand: list[Sequence] | None = None) -> Iterator[None]:
        """Around all that changes the engine: interrupts wait for the end, and after an exception of any kind it can go
        on. Requests of whom something is lost are given up."""
        with InterruptsHeldBack():
            self.in_hand = in_hand
            try:
                yield
            except KernelCheckFailed as error:
                self.check_failed = error
                raise
            except BaseException:
                for request_id in self._mend():
                    self._core.give_up(request_id)
                raise
            self.in_hand = None

    def recover(self, error: Exception, plan: SchedulerOutput | None = None) -> list[TokenDelta]:
        """A failed step may have consumed the donated pool: everyone is recomputed in a new one. Without a plan it failed
        on the host.

        A second failure in a row ends the newest request of the step, so that one that breaks the step cannot take the
        others with it for ever.
        """
        core = self._core
        what = "a step" if plan is None else f"a step of {plan.num_tokens} tokens"
        logger.error("%s failed; its requests are recomputed", what, exc_info=error)
        self.num_failed_steps += 1
        if plan is None:
            newest = core.scheduler.running[-1:] or list(core.scheduler.waiting)[:1]
        else:
            newest = [seq for seq in core.scheduler.running if seq in plan.num_scheduled_tokens][-1:]
        ending = self._mend(is_lost=True)
        if self.num_failed_steps > 1:
            ending |= {seq.request_id for seq in newest}
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = f"the engine failed to compute this request: {reason}"
        states = [state for request_id, state in core.requests.items() if request_id in ending]
        deltas = [delta for state in states for delta in core.results.fail(state, why)]
        core.tell_levels()
        return deltas

    def _mend(self, *, is_lost: bool = False) -> set[str]:
        """Has everyone recomputed where a plan is left without its step, and writes the books anew where they are half
        written. Returns the requests of whom something is lost: they wait in the queue, and must be ended.

        What is cached stays where the books and the pool are whole; is_lost says that the pool is not.
        """
        core, in_hand = self._core, self.in_hand
        if in_hand is None and not is_lost and len(core.in_flight) == len(core.scheduler.in_flight):
            return set()
        self.in_hand = in_hand or []
        if in_hand is not None or not core.runner.has_state():
            is_lost = True
        if any(plan.swapped_in for plan in core.scheduler.in_flight):  # what comes back can be found before it is there
            is_lost = True
        core.in_flight.clear()
        if in_hand is not None:
            core.open_new_books()
        else:
            core.pins.let_go()
            core.scheduler.preempt_all()
            if is_lost:
                core.kv.forget()
        if is_lost:
            core.runner.reset_state()
            core.pins.recompute()
        self.in_hand = None
        return {seq.request_id for seq in in_hand or ()} - core.pins.prefixes.keys()  # which are queued again
