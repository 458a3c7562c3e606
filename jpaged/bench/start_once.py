"""One start of an engine, for `startup`: a process of its own that prints its numbers as one line of JSON.

python -m jpaged.bench.start_once '{"model": ...}' SECONDS_SINCE_THE_EPOCH_AT_WHICH_IT_WAS_STARTED
"""

import asyncio
import json
import os
import sys
import time

from jpaged.async_llm import AsyncLLM
from jpaged.config import EngineConfig
from jpaged.sampling_params import SamplingParams

POLL_SECONDS = 0.02
PROMPT = "The capital of France is"


async def start_engine(config: EngineConfig, started: float) -> dict:
    """What the server does: load, answer a request while programs are compiled in the background, until all are there.

    Returns the seconds since started of every stage, and what was compiled. Raises RuntimeError where compiling fails.
    """
    seconds = {"import": time.time() - started}
    engine = AsyncLLM.from_config(config)
    seconds["loaded"] = time.time() - started
    prompt = engine.tokenizer.encode(PROMPT)
    async for _ in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=4), "first"):
        seconds.setdefault("first_token", time.time() - started)
    while not engine.progress.is_complete:
        if error := engine.progress.error:
            raise RuntimeError(error)
        await asyncio.sleep(POLL_SECONDS)
    seconds["ready"] = time.time() - started
    compiled = (value for name, value in engine.metrics.snapshot().items() if name.startswith("xla_compiles{"))
    return {
        "seconds": seconds,
        "programs": engine.progress.num_programs,
        "programs_compiled": int(sum(compiled)),
        "xla_compiled": engine.num_xla_compilations,
    }


def main() -> None:
    config, started = EngineConfig(**json.loads(sys.argv[1])), float(sys.argv[2])
    try:
        result = asyncio.run(start_engine(config, started))
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result), flush=True)
    os._exit(0)  # the engine's threads have nothing left to do


if __name__ == "__main__":
    main()
