"""Outcome: what became of one request, as its client saw it."""

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Times in seconds from the start of the run.

    scheduled: when the request was to be sent. sent: when it was. token_times: when each chunk with tokens came; one
    chunk may bring several. ended: when the server said that the answer is at its end, which may be after the last
    text; 0 where it did not. error: why the request failed, in one line; None for one that was answered to its end.
    """

    prompt_len: int
    scheduled: float
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def e2e(self) -> float:
        return max(self.token_times[-1], self.ended) - self.sent

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float | None:
        """None for a single token."""
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def delay(self) -> float:
        """How late the client sent it: it waited for --max-concurrency, or could not keep up."""
        return self.sent - self.scheduled
