"""Load: sends requests at their times, whether or not the ones before have been answered."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from tqdm import tqdm

from jpaged.bench.client import CompletionClient
from jpaged.bench.outcomes import Outcome
from jpaged.bench.workloads import BenchRequest


async def send_all(
    client: CompletionClient,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
) -> tuple[list[Outcome], float]:
    """The outcome of every request, in order, and the seconds from the start to the last one's end.

    Times to send are fixed before the run: a server that stalls delays no arrival, and so hides no latency. Only
    max_concurrency makes a request wait for another; Outcome.delay tells how long.
    """
    bodies = [client.body(request) for request in requests]
    slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    async def send(request: BenchRequest, body: bytes, arrival: float) -> Outcome:
        outcome = Outcome(len(request.prompt), arrival)
        await asyncio.sleep(arrival - clock())
        async with slots:
            await client.complete(body, outcome, clock)
        bar.update()
        return outcome

    with tqdm(total=len(requests), desc="requests", unit="request", leave=False) as bar:
        outcomes = await asyncio.gather(*map(send, requests, bodies, arrivals))
    return outcomes, clock()
