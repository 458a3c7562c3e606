"""vLLM's CPU build as a worker: float32, all cores (VLLM_CPU_OMP_THREADS_BIND and VLLM_CPU_KVCACHE_SPACE: peer.py).

Settings: prefix caching off, since prompts are never seen twice; block size and token budget its own choice for CPU
(128 and 4096); its engine in processes of its own, which it needs to bind threads; no text is made. It asks for
tcmalloc and libiomp to be preloaded; runs with them on a busy machine did not show which is faster.
"""

import sys

from vllm import LLM, SamplingParams, __version__
from worker import MAX_RUNNING, Run, serve_runs


def start() -> tuple[str, Run]:
    llm = LLM(sys.argv[1], dtype="float32", enable_prefix_caching=False, max_num_seqs=MAX_RUNNING)

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
