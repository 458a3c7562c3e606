"""The picture of a sweep: latency against request rate, one panel a metric."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from jpaged.bench.report import METRICS

SIZE = (10, 7)  # inches


def check(rates: Sequence[float]) -> None:
    """Raises what would otherwise be found out after the measurements."""
    if sum(math.isfinite(rate) for rate in rates) < 2:
        raise ValueError("--plot draws latency against rate: give several rates, --request-rate 1,2,4,8")
    _matplotlib()


def draw(results: Sequence[Mapping], percentiles: Sequence[float], path: Path) -> None:
    """Mean, median and percentiles of each metric in milliseconds; rates without an end have no place on the axis."""
    plt = _matplotlib()
    shown = sorted((r for r in results if isinstance(r["request_rate"], float)), key=lambda r: r["request_rate"])
    rates = [result["request_rate"] for result in shown]
    figure, axes = plt.subplots(2, 2, figsize=SIZE, sharex=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, METRICS.items()):
        for label, key in (("mean", "mean"), ("median", "median"), *((f"P{p:g}", f"p{p:g}") for p in percentiles)):
            values = [math.nan if (v := result[f"{key}_{name}_ms"]) is None else v for result in shown]
            axis.plot(rates, values, marker="o", label=label)
        axis.set_title(title)
        axis.set_ylabel(f"{name.upper()} (ms)")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("request rate (req/s)")
    axes.flat[0].legend()
    first = shown[0]
    figure.suptitle(f"{first['model_id']}, {first['num_prompts']} requests at each rate")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _matplotlib():
    """Raises RuntimeError, one line, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install 'jpaged[bench]'") from None
    matplotlib.use("agg")  # a file, no window
    import matplotlib.pyplot as plt

    return plt
