"""Hugging Face transformers as a worker: `generate` over a padded batch, or `generate_batch` (paged, continuous).

argv: the model folder, and which of the two. Settings: float32; as many threads as cores; scaled dot product
attention; no sampling, no log-probs.
"""

import os
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from worker import Run, serve_runs


def start() -> tuple[str, Run]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
    runs = {"generate": padded, "generate_batch": continuous}
    settings = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, {sys.argv[2]}"
    return settings, runs[sys.argv[2]](model)


def padded(model) -> Run:
    @torch.inference_mode()
    def run(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        ids = torch.tensor(prompts)  # the workloads that it gets have prompts of one length: nothing to pad
        outputs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_lens[0],
            min_new_tokens=output_lens[0],
            do_sample=False,
        )
        return [outputs.shape[1] - ids.shape[1]] * len(prompts)

    return run


def continuous(model) -> Run:
    @torch.inference_mode()
    def run(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        outputs = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=output_lens[0], do_sample=False, eos_token_id=-1),
        )
        return [len(output.generated_tokens) for output in outputs.values()]

    return run


if __name__ == "__main__":
    serve_runs(start)
