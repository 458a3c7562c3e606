"""The worker side of the peer harness: a process that holds one engine and serves requests as JSON lines.

It is imported by every peer's own Python, so it needs the standard library alone, and no newer Python than 3.10.
"""

import json
import os
import sys
import time
from collections.abc import Callable

MAX_RUNNING = 64  # requests of any workload, all at once: an engine that wants a limit is told this one

Run = Callable[[list[list[int]], list[int]], list[int]]


def serve(start: Callable[[], tuple[str, Callable[[dict], dict]]]) -> None:
    """start() -> (version and settings, answer). Says those, and then answers each line of stdin with one line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout, their child processes too: that is no answer
    settings, answer = start()
    print(json.dumps({"ready": settings}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


def serve_runs(start: Callable[[], tuple[str, Run]]) -> None:
    """start() -> (version and settings, run). Answers with the seconds that run took, and what it returned.

    run(prompts, output_lens) generates greedily from token ids, ignoring EOS, and returns how many tokens each request
    got. The clock is around run alone, and every worker does the same in it: lists of ids in, counts out, no text.
    """

    def start_timed() -> tuple[str, Callable[[dict], dict]]:
        settings, run = start()

        def answer(request: dict) -> dict:
            begin = time.perf_counter()
            counts = run(request["prompts"], request["output_lens"])
            return {"seconds": time.perf_counter() - begin, "num_output_tokens": counts}

        return settings, answer

    serve(start_timed)
