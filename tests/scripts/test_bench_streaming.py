"""The streaming benchmark counts what a real server streamed, and says why where it did not."""

import asyncio
import time

import pytest
from bench_streaming import stream
from tiny_model import make_tiny_model

from jpaged.bench.server_process import ServerProcess
from jpaged.bench.workloads import BenchRequest

pytestmark = pytest.mark.long  # a server of its own


def test_a_rate_is_of_all_that_was_streamed_and_a_refusal_is_told(tmp_path, programs_dir):
    flags = (
        "--model", str(make_tiny_model(tmp_path)), "--dtype", "float32", "--block-size", "16", "--max-num-seqs", "2",
        "--max-num-batched-tokens", "2", "--max-model-len", "64", "--compilation-cache-dir", programs_dir,
    )  # fmt: skip
    with ServerProcess(flags) as server:
        begin = time.perf_counter()
        rate = asyncio.run(stream(server.url, [BenchRequest([5, 6, 7], 20)] * 3))
        assert rate >= 3 * 20 / (time.perf_counter() - begin)
        with pytest.raises(RuntimeError, match="a request failed: .*maximum context length is 64 tokens"):
            asyncio.run(stream(server.url, [BenchRequest([5] * 60, 20)]))
