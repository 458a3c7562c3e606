"""Workload: how many requests of which lengths. All start at once, greedy, EOS ignored, prompts of random token ids."""

import random
from dataclasses import dataclass
from pathlib import Path

from jpaged.bench.traces import SHAREGPT_LIKE, read_lengths

TRACE_REQUESTS = 60  # all run at once
TRACE_MAX_TOTAL = 2048  # prompt and output together, as the data is usually cut
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Workload:
    """lengths: (prompt, output) tokens of each request."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(output for _, output in self.lengths)

    def request(self, rng: random.Random, vocab_size: int, *, is_warm_up: bool = False) -> dict:
        """What a worker is sent: prompts that nobody has seen, so that nothing is in a prefix cache.

        A warm-up has the same prompts' lengths, and a few tokens of output.
        """
        return {
            "prompts": [[rng.randrange(vocab_size) for _ in range(length)] for length, _ in self.lengths],
            "output_lens": [min(output, WARM_UP_TOKENS) if is_warm_up else output for _, output in self.lengths],
        }


def uniform(num_requests: int, prompt_len: int, output_len: int) -> Workload:
    return Workload(f"{num_requests}x({prompt_len}+{output_len})", ((prompt_len, output_len),) * num_requests)


def from_trace(path: Path, seed: int = 0) -> Workload:
    """A seeded sample of a trace's requests."""
    rows = read_lengths(path, TRACE_MAX_TOTAL)
    return Workload("ShareGPT-like", tuple(random.Random(seed).sample(rows, TRACE_REQUESTS)))


def workloads() -> list[Workload]:
    return [uniform(32, 128, 128), uniform(64, 256, 128), uniform(1, 32, 128), from_trace(SHAREGPT_LIKE)]
