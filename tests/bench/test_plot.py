"""The picture of a sweep."""

import pytest

from jpaged.bench.outcomes import Outcome
from jpaged.bench.plot import draw
from jpaged.bench.report import summarise


def test_a_sweep_becomes_a_picture_with_a_line_a_statistic(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: the extras bench and test install it")
    results = []
    for rate in (4.0, 1.0, "inf"):
        outcome = Outcome(5, 0.0, 0.0, [0.1], 1)  # a single token: no TPOT and no ITL to draw
        results.append({"request_rate": rate, "model_id": "tiny", "num_prompts": 1} | summarise([outcome], 1.0, [99.0]))
    draw(results, [99.0], tmp_path / "sweep.svg")
    svg = (tmp_path / "sweep.svg").read_text()
    assert "End-to-end Latency" in svg and "P99" in svg and "tiny, 1 requests at each rate" in svg
