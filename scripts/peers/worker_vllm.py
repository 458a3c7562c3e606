"""vLLM's CPU build as a worker."""

import os
import sys

from vllm import LLM, SamplingParams, __version__
from worker import Run, serve_runs


def start() -> tuple[str, Run]:
    options = eval(os.environ.get("VOPT", "{}"))
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        enable_prefix_caching=False,
        **({"max_num_seqs": 64} | options),
    )

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return f"vLLM {__version__}, float32", run


if __name__ == "__main__":
    serve_runs(start)
