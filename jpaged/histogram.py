"""Histogram: counts by upper bound, cheap enough for every step."""

from bisect import bisect_left


class Histogram:
    """Counts by upper bound (inclusive), as Prometheus wants them. Whoever writes sees to it that nobody else does."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of the same value at the cost of one."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or under it), cumulative, ending in +Inf."""
        cumulative, result = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            cumulative += count
            result.append((bound, float(cumulative)))
        return result
