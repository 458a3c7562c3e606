"""vLLM's V1 scheduler without a model, as a worker: what bench_scheduler.py measures of ours.

Its own `Scheduler`, with the configuration that its engine would make, prefix caching on; a step is `schedule()` and
`update_from_output()` with made-up tokens. Input preparation, which our host step has too, is not in vLLM's times.
"""

import random
import sys
import time

import torch
from vllm import SamplingParams, __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from worker import serve

VOCAB_SIZE = 49152


def make_scheduler(model: str, num_seqs: int, num_tokens: int, block_size: int) -> Scheduler:
    """With blocks enough for num_seqs sequences of num_tokens."""
    config = EngineArgs(
        model=model,
        dtype="float32",
        block_size=block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(512, 2 * num_seqs),
        enable_prefix_caching=True,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.float32)
    num_blocks = num_seqs * -(-num_tokens // block_size) + 1
    config.cache_config.num_gpu_blocks = num_blocks
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=block_size, hash_block_size=block_size)


def start():
    init_none_hash(sha256)

    def answer(request: dict) -> dict:
        num_seqs, prompt_len, num_steps = (request[name] for name in ("num_seqs", "prompt_len", "num_steps"))
        longest = prompt_len + 2 * num_seqs + num_steps  # the first ones decode while the last ones are prefilled
        scheduler = make_scheduler(sys.argv[1], num_seqs, longest, request["block_size"])
        hasher = get_request_block_hasher(request["block_size"], sha256)
        params = SamplingParams(temperature=0.7, max_tokens=longest - prompt_len, ignore_eos=True)
        rng = random.Random(0)
        for i in range(num_seqs):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]
            scheduler.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
        times = {"schedule": [], "update": []}
        while len(times["update"]) < num_steps:
            begin = time.perf_counter()
            plan = scheduler.schedule()
            scheduled = time.perf_counter()
            output = model_output(scheduler, plan, rng)
            computed = time.perf_counter()
            scheduler.update_from_output(plan, output)
            updated = time.perf_counter()
            if len(plan.num_scheduled_tokens) == plan.total_num_scheduled_tokens == num_seqs:
                times["schedule"].append(scheduled - begin)
                times["update"].append(updated - computed)
        return times

    return f"vLLM {__version__}", answer


def model_output(scheduler: Scheduler, plan, rng: random.Random) -> ModelRunnerOutput:
    """A token for every sequence of the plan whose prompt is computed."""
    ids = list(plan.num_scheduled_tokens)
    tokens = []
    for request_id in ids:
        request = scheduler.requests[request_id]
        is_computed = request.num_computed_tokens >= request.num_tokens
        tokens.append([rng.randrange(VOCAB_SIZE)] if is_computed else [])
    return ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, sampled_token_ids=tokens)


if __name__ == "__main__":
    serve(start)
