"""llama.cpp as a worker, on the GGUF itself (Q4_1), through llama-cpp-python's low-level API.

Settings: compiled for this processor; as many threads as cores; a batch of up to 2048 tokens, so
prompts of all sequences are prefilled together; then one token of every sequence a step. Logits are asked for only
where a token is chosen, and that is numpy's argmax over them (llama.cpp's greedy sampler first copies the vocabulary
into candidates: slower). One KV cache for all sequences (kv_unified); whether one each is faster is not measured yet.
"""

import os
import sys

import llama_cpp
import numpy as np
from worker import MAX_RUNNING, Run, serve_runs

CONTEXT_TOKENS = 384  # of each sequence: the longest workload
BATCH_TOKENS = 2048


class Batch:
    """llama.cpp's batch, filled token by token."""

    def __init__(self):
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.clear()

    def clear(self) -> None:
        self._batch.n_tokens = 0
        self.sampled: list[int] = []  # the sequences whose next token comes out, in order

    @property
    def num_free(self) -> int:
        return BATCH_TOKENS - self._batch.n_tokens

    def add(self, token: int, position: int, sequence: int, is_last: bool) -> None:
        i = self._batch.n_tokens
        self._batch.token[i] = token
        self._batch.pos[i] = position
        self._batch.n_seq_id[i] = 1
        self._batch.seq_id[i][0] = sequence
        self._batch.logits[i] = is_last
        self._batch.n_tokens = i + 1
        if is_last:
            self.sampled.append(sequence)

    def decode(self, context, vocab_size: int) -> dict[int, int]:
        """{sequence: its next token}; the batch is empty afterwards."""
        status = llama_cpp.llama_decode(context, self._batch)
        assert status == 0, f"llama_decode returned {status}"
        tokens = {}
        if self.sampled:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(self.sampled), vocab_size))
            tokens = dict(zip(self.sampled, logits.argmax(axis=1).tolist()))
        self.clear()
        return tokens


def start() -> tuple[str, Run]:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = MAX_RUNNING * CONTEXT_TOKENS
    params.n_seq_max = MAX_RUNNING
    params.n_batch = BATCH_TOKENS
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    batch = Batch()

    def run(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        assert len(prompts) <= MAX_RUNNING, f"{len(prompts)} sequences; the context is made for {MAX_RUNNING}"
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        outputs: list[list[int]] = [[] for _ in prompts]

        def decode() -> None:
            for sequence, token in batch.decode(context, vocab_size).items():
                outputs[sequence].append(token)

        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                if not batch.num_free:
                    decode()
                batch.add(token, position, sequence, position == len(prompt) - 1)
        decode()
        running = range(len(prompts))
        while running := [sequence for sequence in running if len(outputs[sequence]) < output_lens[sequence]]:
            for sequence in running:
                output = outputs[sequence]
                batch.add(output[-1], len(prompts[sequence]) + len(output) - 1, sequence, True)
            decode()
        return [len(output) for output in outputs]

    return f"llama-cpp-python {llama_cpp.__version__}, Q4_1", run


if __name__ == "__main__":
    serve_runs(start)
