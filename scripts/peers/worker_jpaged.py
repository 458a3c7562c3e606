"""jpaged as a worker: `LLM` with its default settings, prefix cache and all."""

import sys
from pathlib import Path

from worker import Run, serve_runs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax

from jpaged import LLM, SamplingParams


def start() -> tuple[str, Run]:
    llm = LLM(sys.argv[1])
    llm.warm_up(use_tqdm=False)  # as a server does, in the background

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in output_lens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return f"jax {jax.__version__}, {llm.engine.runner.step.dtype.name}, block size {llm.engine.spec.block_size}", run


if __name__ == "__main__":
    serve_runs(start)
