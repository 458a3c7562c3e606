"""The worker side of the peer harness: a process that holds one engine and serves requests as JSON lines.

It is imported by every peer's own Python, so it needs the standard library alone, and no newer Python than 3.10.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Run = Callable[[list[list[int]], list[int]], list[int]]


def serve(start: Callable[[], tuple[str, Run]]) -> None:
    """Starts the engine, says so, and then answers each line of stdin with one line.

    start() -> (the engine's version and settings, run). run(prompts, output_lens) generates greedily from
    token ids, ignoring EOS, and returns how many tokens each request got. The clock is around run alone, so each
    worker does as much before and after it as the others: lists of ids in, lengths out, no text.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout, child processes too: that is no answer
    settings, run = start()
    print(json.dumps({"ready": settings}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        counts = run(request["prompts"], request["output_lens"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "num_output_tokens": counts}), file=answers)
